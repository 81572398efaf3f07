//! A person: the subject of the quickstart's sentences, written as JSON or as a note.

use serde_json::json;

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Person {
    pub name: &'static str,
    pub age: u32,
    pub city: &'static str,
}

pub(crate) const NUM_SENTENCES: usize = 4;

impl Person {
    /// The user's message: the facts in one of [`NUM_SENTENCES`] wordings.
    pub(crate) fn sentence(&self, wording: usize) -> String {
        let Self { name, age, city } = self;
        match wording % NUM_SENTENCES {
            0 => format!(r#""{name}" is {age} years old and lives in "{city}"."#),
            1 => format!(r#""{name}" from "{city}" is {age}."#),
            2 => format!(r#"In "{city}" lives "{name}", who is {age} years old."#),
            _ => format!(r#"At {age}, "{name}" moved to "{city}"."#),
        }
    }

    /// The preferred completion: JSON.
    pub(crate) fn as_json(&self) -> String {
        let Self { name, age, city } = self;
        format!(r#"{{"name": "{name}", "age": {age}, "city": "{city}"}}"#)
    }

    /// The correct but not preferred completion: a note.
    pub(crate) fn as_note(&self) -> String {
        let Self { name, age, city } = self;
        format!(r#"The person is "{name}", aged {age}, living in "{city}"."#)
    }

    /// Returns whether `answer` is the note with exactly this person's facts.
    pub(crate) fn is_noted_by(&self, answer: &str) -> bool {
        answer.trim() == self.as_note()
    }

    /// Judge: returns whether `answer` is JSON with exactly this person's facts.
    pub(crate) fn is_told_by(&self, answer: &str) -> bool {
        serde_json::from_str::<serde_json::Value>(answer.trim())
            .is_ok_and(|found| found == json!({"name": self.name, "age": self.age, "city": self.city}))
    }
}

#[rustfmt::skip]
pub(crate) const NAMES: [&str; 24] = [
    "Ana", "Ben", "Carla", "Dmitri", "Elena", "Farid", "Grace", "Hiro", "Ines", "Jonas", "Karin", "Luis",
    "Mona", "Nils", "Olga", "Pablo", "Quinn", "Rosa", "Samir", "Tara", "Umar", "Vera", "Walter", "Zoe",
];

#[rustfmt::skip]
pub(crate) const CITIES: [&str; 24] = [
    "Oslo", "Lima", "Cairo", "Delhi", "Paris", "Quito", "Rome", "Seoul", "Tokyo", "Vienna", "Accra", "Bern",
    "Dakar", "Essen", "Ghent", "Hanoi", "Izmir", "Kyiv", "Milan", "Nairobi", "Prague", "Riga", "Sofia", "Warsaw",
];

#[cfg(test)]
mod tests {
    use super::*;

    const ANA: Person = Person { name: "Ana", age: 34, city: "Oslo" };

    #[test]
    fn the_judge_accepts_its_own_json_in_any_layout() {
        assert!(ANA.is_told_by(&ANA.as_json()));
        assert!(ANA.is_told_by(" {\"city\":\"Oslo\",\"age\":34,\n\"name\":\"Ana\"}\n"));
    }

    #[test]
    fn the_judge_refuses_what_is_wrong_in_form_or_fact() {
        let wrong = [
            ANA.as_note(),
            String::new(),
            ANA.as_json().replace("34", "35"),
            ANA.as_json().replace("Oslo", "Lima"),
            ANA.as_json().replace("34", "\"34\""),
            ANA.as_json().replace("\"city\"", "\"town\""),
            ANA.as_json().replace('}', ", \"job\": null}"),
            ANA.as_json().replace('}', ""),
            format!("{} Done.", ANA.as_json()),
        ];
        for answer in wrong {
            assert!(!ANA.is_told_by(&answer), "accepted {answer}");
        }
    }

    #[test]
    fn every_wording_tells_every_fact() {
        for wording in 0..NUM_SENTENCES {
            let text = ANA.sentence(wording);
            assert!(["Ana", "34", "Oslo"].iter().all(|fact| text.contains(fact)), "{text}");
        }
    }
}
