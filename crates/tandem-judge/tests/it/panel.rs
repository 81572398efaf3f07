//! Sums of several judges' scores.

use std::sync::atomic::AtomicBool;

use serde_json::Map;
use tandem_judge::{Counts, Judge, JudgeError, Member, Panel, PromptWithCompletions, Result, Verdict};

use crate::support::{GO, group};

/// Judge with a constant verdict.
struct Fixed(&'static str, Vec<Option<f64>>);

impl Judge for Fixed {
    fn name(&self) -> &str {
        self.0
    }

    fn judge(&mut self, groups: &[PromptWithCompletions<'_>], _: &AtomicBool) -> Result<Vec<Vec<Verdict>>> {
        let verdict = |score: &Option<f64>| Verdict { score: *score, said: self.0.into() };
        Ok(groups.iter().map(|_| self.1.iter().map(verdict).collect()).collect())
    }

    fn counts(&self) -> Counts {
        Counts { judged: self.1.len() as u64, ..Counts::default() }
    }
}

fn member(name: &'static str, weight: f64, scores: &[Option<f64>]) -> Member {
    Member { judge: Box::new(Fixed(name, scores.to_vec())), weight, may_abstain: false }
}

fn refused(members: Vec<Member>) -> String {
    Panel::new(members).err().unwrap().to_string()
}

#[test]
fn a_judge_that_may_abstain_leaves_a_response_to_the_others() {
    let abstains = |member| Member { may_abstain: true, ..member };
    let members = vec![
        abstains(member("sometimes", 2.0, &[Some(1.0), None, Some(1.0), None])),
        abstains(member("seldom", 1.0, &[Some(0.5), Some(0.5), Some(0.5), None])),
        member("always", 0.5, &[Some(4.0), Some(4.0), None, Some(4.0)]),
    ];
    let mut panel = Panel::new(members).unwrap();
    let row = Map::new();
    let found = panel.judge(&[group("?", &row, &["1", "2", "3", "4"])], &AtomicBool::new(false)).unwrap();
    let totals: Vec<_> = found[0].iter().map(|assessment| assessment.total).collect();
    assert_eq!(totals, [Some(4.5), Some(2.5), None, Some(2.0)]);
    let alone = Panel::new(vec![abstains(member("alone", 1.0, &[]))]).unwrap();
    assert_eq!(alone.total(&[None]), None, "nobody has given a score");
}

#[test]
fn a_judge_that_scores_nothing_is_an_error_unless_it_may_abstain_or_does_not_count() {
    let row = Map::new();
    let groups = [group("?", &row, &["1", "2"]), group("!", &row, &["1", "2"])];
    let judged = |silent: Member| {
        Panel::new(vec![member("length", 1.0, &[Some(1.0); 2]), silent]).unwrap().judge(&groups, &GO)
    };
    let silent = |weight| member("silent", weight, &[None; 2]);
    let error = judged(silent(2.0)).unwrap_err().to_string();
    assert!(error.starts_with("judge `silent`: 0 of 4 answers scored: silent; "), "{error}");
    assert!(judged(silent(0.0)).is_ok());
    assert!(judged(Member { may_abstain: true, ..silent(2.0) }).is_ok());
    assert!(judged(member("once", 2.0, &[None, Some(1.0)])).is_ok());
}

#[test]
fn totals_are_weighted_sums_and_never_made_up() {
    let (nan, inf) = (Some(f64::NAN), Some(f64::INFINITY));
    let members = vec![
        member("half", 0.5, &[Some(2.0), Some(4.0), None, nan, inf, Some(1e308)]),
        member("minus", -2.0, &[Some(3.0), Some(0.25), Some(1.0), Some(1.0), Some(1.0), Some(-1e308)]),
        member("shown", 0.0, &[Some(9.0), None, Some(9.0), nan, inf, Some(9.0)]),
    ];
    let mut panel = Panel::new(members).unwrap();
    let row = Map::new();
    let groups = [
        group("?", &row, &["1", "2", "3", "4", "5", "6"]),
        group("!", &row, &["1", "2", "3", "4", "5", "6"]),
    ];
    let assessments = panel.judge(&groups, &GO).unwrap();
    for group in &assessments {
        let totals: Vec<_> = group.iter().map(|assessment| assessment.total).collect();
        // 0.5·2 − 2·3, 0.5·4 − 2·0.25, no score, not a number, infinite, too large a sum.
        assert_eq!(totals, [Some(-5.0), Some(1.5), None, None, None, None]);
        assert_eq!(
            group[1].verdicts.iter().map(|verdict| &verdict.said).collect::<Vec<_>>(),
            ["half", "minus", "shown"]
        );
        assert_eq!(group[1].verdicts[2].score, None);
    }
    assert_eq!(panel.names().collect::<Vec<_>>(), ["half", "minus", "shown"]);
    assert!(panel.counts().all(|(_, counts)| counts.judged == 6));
}

#[test]
fn panels_that_make_no_sense_are_refused() {
    let one = |name, weight| member(name, weight, &[Some(1.0)]);
    assert!(refused(vec![]).contains("no judge whose score counts"));
    assert!(refused(vec![one("a", 0.0)]).contains("no judge whose score counts"));
    assert!(refused(vec![one("a", 1.0), one("a", 1.0)]).contains("two judges `a`"));
    assert_eq!(refused(vec![one("a", f64::NAN)]), "judge `a`: `weight` is NaN; it should be a finite number");
}

#[test]
#[should_panic(expected = "judge `short` did not give one verdict for each answer")]
fn a_judge_that_leaves_answers_out_is_a_bug() {
    let mut panel = Panel::new(vec![member("short", 1.0, &[Some(1.0)])]).unwrap();
    let row = Map::new();
    let _ = panel.judge(&[group("?", &row, &["1", "2"])], &GO);
}

#[test]
fn a_judges_error_is_the_panels() {
    struct Broken;
    impl Judge for Broken {
        fn name(&self) -> &str {
            "broken"
        }

        fn judge(&mut self, _: &[PromptWithCompletions<'_>], _: &AtomicBool) -> Result<Vec<Vec<Verdict>>> {
            Err(JudgeError::Budget { judge: "broken".to_owned(), budget: 3 })
        }

        fn counts(&self) -> Counts {
            Counts::default()
        }
    }
    let mut panel =
        Panel::new(vec![Member { judge: Box::new(Broken), weight: 1.0, may_abstain: false }]).unwrap();
    let error = panel.judge(&[], &GO).unwrap_err().to_string();
    assert!(error.starts_with("judge `broken`: the budget of 3 requests is spent"), "{error}");
}
