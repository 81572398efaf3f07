//! Each rule, and what it refuses.

use serde_json::{Map, Value, json};
use tandem_judge::{
    Candidate, Compare, ExactConfig, Expect, JsonConfig, Judge, LengthConfig, LengthUnit, MissingEosConfig,
    Prompt, PromptWithCompletions, RegexConfig, Rule, RuleJudge, Verdict,
};

use crate::support::{GO, group, scores};

fn verdicts(rule: Rule, row: &Value, answers: &[&str]) -> tandem_judge::Result<Vec<Verdict>> {
    let row = row.as_object().unwrap().clone();
    let mut judge = RuleJudge::new("rule", rule)?;
    let verdicts = judge.judge(&[group("?", &row, answers)], &GO)?.remove(0);
    let counts = judge.counts();
    assert_eq!((counts.judged, counts.unscored), (answers.len() as u64, 0));
    Ok(verdicts)
}

/// Returns the scores; all must exist.
fn scored(rule: Rule, row: &Value, answers: &[&str]) -> Vec<f64> {
    scores(&verdicts(rule, row, answers).unwrap()).into_iter().flatten().collect()
}

/// Returns the error of a rule that cannot be built, or of a row that it cannot use.
fn refused(rule: Rule, row: &Value) -> String {
    verdicts(rule, row, &["answer 1"]).unwrap_err().to_string()
}

#[test]
fn length_in_a_range() {
    let rule = LengthConfig { min: 2, max: Some(3), ..LengthConfig::default() };
    assert_eq!(scored(Rule::Length(rule), &json!({}), &["a", "ab", "abc", "abcd"]), [0.0, 1.0, 1.0, 0.0]);
}

#[test]
fn length_by_the_unit_within_limits() {
    let rule = LengthConfig { unit: LengthUnit::Characters, min: 2, max: Some(4), per_unit: Some(-0.5) };
    // The tests count bytes as tokens; `éé` has four.
    assert_eq!(
        scored(Rule::Length(rule), &json!({}), &["", "éé", "abc", "abcdef"]),
        [-1.0, -1.0, -1.5, -2.0]
    );
}

#[test]
fn a_length_that_cannot_be_or_says_nothing_is_refused() {
    let rule = LengthConfig { min: 5, max: Some(4), ..LengthConfig::default() };
    assert_eq!(refused(Rule::Length(rule), &json!({})), "judge `rule`: `max` is 4, less than `min` = 5");
    let rule = LengthConfig { per_unit: Some(f64::NAN), ..LengthConfig::default() };
    assert!(refused(Rule::Length(rule), &json!({})).contains("`per_unit` should be a finite number"));
    assert!(refused(Rule::Length(LengthConfig::default()), &json!({})).contains("`max` is missing"));
}

#[test]
fn an_expression_matches_or_does_not() {
    let rule = |expect| Rule::Regex(RegexConfig { pattern: "[0-9]+".to_owned(), expect });
    let verdicts = verdicts(rule(Expect::Match), &json!({}), &["a 12 b", "none"]).unwrap();
    assert_eq!(scores(&verdicts), [Some(1.0), Some(0.0)]);
    assert_eq!(verdicts[0].said, json!({ "found": "12" }));
    assert_eq!(scored(rule(Expect::NoMatch), &json!({}), &["a 12 b", "none"]), [0.0, 1.0]);
}

#[test]
fn an_expressions_first_group_is_compared_with_a_field() {
    let expect = Expect::Group { field: "answer".to_owned() };
    let rule =
        || Rule::Regex(RegexConfig { pattern: "#### (.*)|nothing".to_owned(), expect: expect.clone() });
    let answers = ["so\n#### 42 ", "#### 43", "42", "nothing"];
    assert_eq!(scored(rule(), &json!({ "answer": 42 }), &answers), [1.0, 0.0, 0.0, 0.0]);
    assert_eq!(scored(rule(), &json!({ "answer": " 42" }), &answers), [1.0, 0.0, 0.0, 0.0]);
}

#[test]
fn a_bad_expression_is_refused() {
    let rule = |pattern: &str, expect| Rule::Regex(RegexConfig { pattern: pattern.to_owned(), expect });
    let message = refused(rule("a(", Expect::Match), &json!({}));
    assert!(message.starts_with("judge `rule`: `pattern` is no regular expression"), "{message}");
    assert!(refused(rule("", Expect::Match), &json!({})).contains("is empty"));
    let expect = Expect::Group { field: "answer".to_owned() };
    assert!(refused(rule("[0-9]+", expect), &json!({})).contains("has no group to compare"));
}

#[test]
fn an_exact_answer() {
    let rule = |fold_case| {
        let compare = Compare::Text;
        Rule::Exact(ExactConfig { field: "answer".to_owned(), compare, fold_case })
    };
    let (row, answers) = (json!({ "answer": "Köln" }), [" Köln\n", "KÖLN", "in Köln"]);
    assert_eq!(scored(rule(false), &row, &answers), [1.0, 0.0, 0.0]);
    assert_eq!(scored(rule(true), &row, &answers), [1.0, 1.0, 0.0]);
}

#[test]
fn the_last_number() {
    let rule = || {
        Rule::Exact(ExactConfig {
            field: "answer".to_owned(),
            compare: Compare::LastNumber,
            ..ExactConfig::default()
        })
    };
    let answers = ["3 and 1,200 apples", "1200.0.", "$1200", "1.2e3", "-1200", "1199", "many"];
    let expected = [1.0, 1.0, 1.0, 1.0, 0.0, 0.0, 0.0];
    assert_eq!(scored(rule(), &json!({ "answer": 1200 }), &answers), expected);
    assert_eq!(scored(rule(), &json!({ "answer": "7 * … = 1200\n#### 1,200" }), &answers), expected);
    // A hyphen is a sign, but not between words.
    assert_eq!(
        scored(rule(), &json!({ "answer": -3 }), &["is -3", "5 -3", "5-3", "(5)-3"]),
        [1.0, 1.0, 0.0, 0.0]
    );
    assert_eq!(scored(rule(), &json!({ "answer": 0.5 }), &[".5", "0.50", "5", "1.5"]), [1.0, 1.0, 0.0, 0.0]);
    assert_eq!(scored(rule(), &json!({ "answer": 3 }), &["1, 2, 3", "12,3", "v2.3"]), [1.0, 1.0, 0.0]);
}

#[test]
fn a_row_without_the_field_is_named() {
    let rule = || Rule::Exact(ExactConfig { field: "answer".to_owned(), ..ExactConfig::default() });
    let message = refused(rule(), &json!({ "solution": 1, "level": 2 }));
    assert_eq!(
        message,
        "judge `rule`: rows.jsonl:7: the row's field `answer` is not there (fields: `solution`, `level`); \
         it should be a text or a number"
    );
    assert!(refused(rule(), &json!({ "answer": [1] })).contains("is a list"));
    let compare = Compare::LastNumber;
    let rule = Rule::Exact(ExactConfig { field: "answer".to_owned(), compare, fold_case: false });
    assert!(refused(rule, &json!({ "answer": "many" })).contains("`answer` has no number in it"));
    let message = refused(Rule::Exact(ExactConfig::default()), &json!({}));
    assert!(message.contains("`field` is empty"), "{message}");
}

#[test]
fn json_with_keys_or_any() {
    let answers = [" {\"a\": 1, \"b\": null}\n", "{\"a\": 1}", "[1]", "{\"a\": 1} so", ""];
    assert_eq!(scored(Rule::Json(JsonConfig::default()), &json!({}), &answers), [1.0, 1.0, 1.0, 0.0, 0.0]);
    let keys = vec!["a".to_owned(), "b".to_owned()];
    let verdicts = verdicts(Rule::Json(JsonConfig { keys }), &json!({}), &answers).unwrap();
    assert_eq!(scores(&verdicts), [1.0, 0.0, 0.0, 0.0, 0.0].map(Some));
    assert_eq!(verdicts[1].said, "no key `b`");
}

#[test]
fn an_answer_that_did_not_end_is_penalised() {
    let mut judge = RuleJudge::new("eos", Rule::MissingEos(MissingEosConfig { penalty: 2.5 })).unwrap();
    let candidate = |is_ended| Candidate { text: "…", tokens: 1, is_ended };
    let row = Map::new();
    let answers = vec![candidate(true), candidate(false)];
    let group = PromptWithCompletions { place: "", prompt: Prompt::Messages(&[]), row: &row, answers };
    assert_eq!(scores(&judge.judge(&[group], &GO).unwrap()[0]), [Some(0.0), Some(-2.5)]);
    for penalty in [0.0, -1.0, f64::INFINITY] {
        let message = refused(Rule::MissingEos(MissingEosConfig { penalty }), &json!({}));
        assert!(message.starts_with("judge `rule`: `penalty` is "), "{message}");
    }
}

#[test]
fn rules_stop() {
    let mut judge = RuleJudge::new("rule", Rule::Json(JsonConfig::default())).unwrap();
    let row = Map::new();
    let stopped = judge.judge(&[group("?", &row, &["1"])], &true.into());
    assert_eq!(stopped.unwrap_err().to_string(), "judging was stopped");
}
