//! The quickstart's data: demonstrations in two styles, preferences for one of them, and prompts
//! held out of both.

use std::collections::HashSet;
use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::Path;

use anyhow::{Context, ensure};
use serde_json::{Value, json};
use tandem_kernels::numerics::random;

use super::person::{CITIES, NAMES, NUM_SENTENCES, Person};

/// Training data and judge prompts of the quickstart.
pub(crate) struct Corpus {
    /// Prompt and demonstrated completion. Half are JSON, half notes; a third of the prompts ask
    /// for neither.
    pub demonstrations: Vec<(String, String)>,
    /// Prompts of the preference pairs, with their facts.
    pub preferences: Vec<(String, Person)>,
    /// Prompts for the judge, with their facts.
    pub held_out: Vec<(String, Person)>,
}

impl Corpus {
    /// Samples the corpus. No held-out combination of name and city occurs in training, in any
    /// wording and with any age: the judge asks for nothing that could be memorised.
    pub(crate) fn draw(
        seed: u64,
        num_demonstrations: usize,
        num_preferences: usize,
        num_held_out: usize,
    ) -> Self {
        let mut dice = Dice(seed);
        // Every prompt has both styles as answers. Two in three ask for a style; the third cannot
        // tell. A trained model tosses a coin there, and DPO settles it.
        let demonstrations = (0..num_demonstrations / 2)
            .flat_map(|i| {
                let (prompt, person) = draw(&mut dice, false);
                let asked =
                    |style: &str| if i % 3 == 0 { prompt.clone() } else { format!("{prompt} {style}") };
                [(asked("As JSON."), person.as_json()), (asked("As a note."), person.as_note())]
            })
            .collect();
        let preferences = (0..num_preferences).map(|_| draw(&mut dice, false)).collect();
        let mut seen = HashSet::new();
        let held_out = std::iter::repeat_with(|| draw(&mut dice, true))
            .filter(|(prompt, _)| seen.insert(prompt.clone()))
            .take(num_held_out)
            .collect();
        Self { demonstrations, preferences, held_out }
    }

    /// Fails unless the held-out prompts, and the combinations of name and city in them, are absent
    /// from training.
    pub(crate) fn check_disjoint(&self) -> anyhow::Result<()> {
        let trained: Vec<&str> = self
            .demonstrations
            .iter()
            .map(|(prompt, _)| prompt.as_str())
            .chain(self.preferences.iter().map(|(prompt, _)| prompt.as_str()))
            .collect();
        for (prompt, person) in &self.held_out {
            let clash = trained.iter().find(|text| text.contains(person.name) && text.contains(person.city));
            ensure!(
                clash.is_none(),
                "the facts of the held-out prompt {prompt:?} occur in training: {clash:?}"
            );
        }
        Ok(())
    }

    /// Writes `sft.jsonl`, `preferences.jsonl` and `held_out.jsonl` in the formats that
    /// `docs/data.md` describes.
    pub(crate) fn write(&self, folder: &Path) -> anyhow::Result<()> {
        let user = |text: &str| json!({"role": "user", "content": text});
        let assistant = |text: String| json!({"role": "assistant", "content": text});
        let pair = |(prompt, person): &(String, Person)| {
            json!({
                "prompt": [user(prompt)],
                "chosen": [assistant(person.as_json())],
                "rejected": [assistant(person.as_note())],
            })
        };
        let demonstration = |(prompt, answer): &(String, String)| json!({"messages": [user(prompt), assistant(answer.clone())]});
        write_lines(&folder.join("sft.jsonl"), self.demonstrations.iter().map(demonstration))?;
        write_lines(&folder.join("preferences.jsonl"), self.preferences.iter().map(pair))?;
        write_lines(&folder.join("held_out.jsonl"), self.held_out.iter().map(pair))
    }

    /// All demonstration texts, for training the tokenizer.
    pub(crate) fn texts(&self) -> impl Iterator<Item = String> + Send + '_ {
        self.demonstrations.iter().flat_map(|(prompt, answer)| [prompt.clone(), answer.clone()])
    }
}

/// Samples a person and a prompt about them, from the held-out combinations or the others.
fn draw(dice: &mut Dice, held_out: bool) -> (String, Person) {
    loop {
        let (name, city) = (dice.below(NAMES.len()), dice.below(CITIES.len()));
        // One combination in five, spread so that every name and every city has some on either
        // side.
        if ((name * 3 + city) % 5 == 0) == held_out {
            let person = Person { name: NAMES[name], age: 20 + dice.below(60) as u32, city: CITIES[city] };
            return (person.sentence(dice.below(NUM_SENTENCES)), person);
        }
    }
}

fn write_lines(path: &Path, rows: impl Iterator<Item = Value>) -> anyhow::Result<()> {
    let write = || -> std::io::Result<()> {
        let mut file = BufWriter::new(File::create(path)?);
        for row in rows {
            writeln!(file, "{row}")?;
        }
        file.flush()
    };
    write().with_context(|| format!("cannot write {}", path.display()))
}

/// A SplitMix64 sequence: seeded, the same on every machine.
struct Dice(u64);

impl Dice {
    fn below(&mut self, bound: usize) -> usize {
        self.0 = self.0.wrapping_add(random::STEP);
        ((u128::from(random::mix(self.0)) * bound as u128) >> 64) as usize
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn half_of_the_demonstrations_are_json() {
        let corpus = Corpus::draw(7, 2000, 0, 0);
        let json = corpus.demonstrations.iter().filter(|(_, answer)| answer.starts_with('{')).count();
        assert_eq!(json, 1000);
        let asked =
            |(prompt, _): &&(String, String)| prompt.ends_with("As JSON.") || prompt.ends_with("As a note.");
        assert_eq!(corpus.demonstrations.iter().filter(asked).count(), 2 * 666);
    }

    #[test]
    fn held_out_prompts_are_distinct_and_not_in_training() {
        let mut corpus = Corpus::draw(7, 2000, 1000, 200);
        corpus.check_disjoint().unwrap();
        assert_eq!(corpus.held_out.iter().map(|(prompt, _)| prompt).collect::<HashSet<_>>().len(), 200);
        // The check can fail: it finds the same facts in other words.
        let leaked = corpus.held_out[0].1.sentence(0);
        corpus.demonstrations.push((leaked, String::new()));
        assert!(corpus.check_disjoint().is_err());
    }

    #[test]
    fn every_name_and_city_of_the_held_out_prompts_is_met_in_training() {
        let corpus = Corpus::draw(7, 2000, 1000, 200);
        for (_, person) in &corpus.held_out {
            for word in [person.name, person.city] {
                assert!(corpus.demonstrations.iter().any(|(prompt, _)| prompt.contains(word)), "{word}");
            }
        }
    }
}
