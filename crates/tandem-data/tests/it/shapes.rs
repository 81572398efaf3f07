//! Shapes of published data sets, mapped columns, and columns that nothing reads.

use serde_json::{Value, json};
use tandem_data::columns::Columns;
use tandem_data::error::Place;
use tandem_data::record::{Content, Parsed, Record, RowKind, Text};
use tandem_data::report::Reason;
use tandem_data::shapes::NamedShape;

fn parse_as(row: &Value, kind: RowKind, columns: &Columns) -> Result<Parsed, String> {
    let place = Place { path: "f.jsonl".into(), line: 7 };
    Record::parse_row(row.to_string().as_bytes(), kind, columns, &place).map_err(|e| e.to_string())
}

/// Parts of every record as JSON: texts as strings, conversations as messages.
fn parts(row: &Value, kind: RowKind, columns: &Columns) -> Vec<Vec<Value>> {
    let text = |text: &Text| match text {
        Text::Plain(text) => json!(text),
        Text::Chat(messages) => json!(messages),
    };
    let parsed = parse_as(row, kind, columns).unwrap();
    let parts = |record: Record| match record.content {
        Content::Text(text) => vec![json!(text)],
        Content::Messages(messages) => vec![json!(messages)],
        Content::Prompt(prompt) => vec![text(&prompt)],
        Content::Completion { prompt, completion } => vec![text(&prompt), text(&completion)],
        Content::Preference { prompt, chosen, rejected } => {
            vec![text(&prompt), text(&chosen), text(&rejected)]
        }
    };
    parsed.records.into_iter().map(parts).collect()
}

fn pairs(row: Value) -> Vec<Vec<Value>> {
    parts(&row, RowKind::Preference, &Columns::default())
}

fn demonstrations(row: Value) -> Vec<Vec<Value>> {
    parts(&row, RowKind::Supervised, &Columns::default())
}

fn taken(row: Value) -> Vec<Vec<Value>> {
    parts(&row, RowKind::Supervised, &Columns { take_chosen: true, ..Columns::default() })
}

fn refused(row: Value, kind: RowKind) -> String {
    parse_as(&row, kind, &Columns::default()).unwrap_err()
}

fn turn(role: &str, content: &str) -> Value {
    json!({"role": role, "content": content})
}

#[test]
fn sharegpt_roles_are_those_of_templates() {
    let row = json!({"conversations": [{"from": "system", "value": "s"}, {"from": "human", "value": "q"},
        {"from": "gpt", "value": "a"}, {"from": "observation", "value": "o"}]});
    let turns = json!([turn("system", "s"), turn("user", "q"), turn("assistant", "a"), turn("tool", "o")]);
    assert_eq!(demonstrations(row), [[turns]]);
    let row = json!({"system": "s", "conversations": [{"from": "human", "value": "q"}],
        "chosen": {"from": "gpt", "value": "a"}, "rejected": {"from": "gpt", "value": "b"}});
    let expected = [
        json!([turn("system", "s"), turn("user", "q")]),
        json!([turn("assistant", "a")]),
        json!([turn("assistant", "b")]),
    ];
    assert_eq!(pairs(row), [expected]);
}

#[test]
fn sharegpt_rows_that_are_not_understood_say_why() {
    let of = |turns: Value| refused(json!({"conversations": turns}), RowKind::Supervised);
    let error = of(json!([{"from": "human", "value": "q"}, {"from": "narrator", "value": "a"}]));
    assert!(
        error.starts_with(
            "f.jsonl:7: not a row of the shape \"sharegpt\": `conversations[1].from` is \"narrator\""
        ),
        "{error}"
    );
    let error = of(json!([{"from": "human", "text": "q"}]));
    assert!(error.contains("`conversations[0].value` should be a string, found nothing"), "{error}");
    assert!(of(json!(["q"])).contains("`conversations[0]` should be { from, value }, found a string"));
    assert!(of(json!([])).contains("`conversations` is empty"));
    assert!(of(json!("q")).contains("`conversations` should be a list, found a string"));
}

#[test]
fn alpaca_and_orca_rows_are_conversations() {
    let row = json!({"instruction": "add", "input": "1 2", "output": "3"});
    assert_eq!(demonstrations(row), [[json!([turn("user", "add\n1 2")]), json!([turn("assistant", "3")])]]);
    let row = json!({"instruction": "hi", "input": "", "output": "ho"});
    assert_eq!(demonstrations(row), [[json!([turn("user", "hi")]), json!([turn("assistant", "ho")])]]);
    let row = json!({"system": "s", "question": "q", "chosen": "a", "rejected": "b"});
    let prompt = json!([turn("system", "s"), turn("user", "q")]);
    let [a, b] = ["a", "b"].map(|text| json!([turn("assistant", text)]));
    assert_eq!(pairs(row.clone()), [[prompt.clone(), a.clone(), b]]);
    assert_eq!(taken(row), [[prompt, a]]);
    let row = json!({"system": "", "question": "q", "chosen": "a", "rejected": "b"});
    assert_eq!(pairs(row)[0][0], json!([turn("user", "q")]));
}

/// The rule of `split_prompt_and_responses` in Mitchell's preference_datasets.py.
#[test]
fn hh_transcripts_are_cut_at_the_last_assistant() {
    let prompt = "\n\nHuman: a\n\nAssistant: b\n\nHuman: c\n\nAssistant:";
    let row = json!({"chosen": format!("{prompt} same yes"), "rejected": format!("{prompt} same no")});
    assert_eq!(pairs(row.clone()), [[json!(prompt), json!(" same yes"), json!(" same no")]]);
    assert_eq!(taken(row.clone()), [[json!(prompt), json!(" same yes")]]);
    let error = refused(row, RowKind::Supervised);
    assert!(error.contains("data.take = \"chosen\""), "{error}");
    // A rejected transcript that leaves the chosen one earlier is cut where they agree.
    let row = json!({"chosen": "\n\nHuman: a\n\nAssistant: b\n\nHuman: c\n\nAssistant: d",
        "rejected": "\n\nHuman: a\n\nAssistant: x"});
    let parts = pairs(row);
    assert_eq!(
        parts,
        [[json!("\n\nHuman: a\n\nAssistant:"), json!(" b\n\nHuman: c\n\nAssistant: d"), json!(" x")]]
    );
}

/// The rule of `get_shp` in Mitchell's preference_datasets.py.
#[test]
fn shp_pairs_need_a_score_ratio_of_two() {
    let row = |labels: i64, a: i64, b: i64| {
        json!({"history": "h", "human_ref_A": "x", "human_ref_B": "y", "labels": labels, "score_A": a,
            "score_B": b, "score_ratio": 9.0, "domain": "d"})
    };
    let prompt = "\n\nHuman: h\n\nAssistant:";
    assert_eq!(pairs(row(1, 8, 4)), [[prompt, " x", " y"]]);
    assert_eq!(pairs(row(0, 4, 8)), [[prompt, " y", " x"]]);
    assert_eq!(taken(row(0, 4, 8)), [[prompt, " y"]]);
    let dropped = parse_as(&row(1, 7, 4), RowKind::Preference, &Columns::default()).unwrap();
    assert_eq!((dropped.records.len(), dropped.dropped), (0, Some(Reason::LowScoreRatio)));
    assert!(refused(row(2, 8, 4), RowKind::Preference).contains("`labels` is 2"));
}

/// The rule of `get_se` in Mitchell's preference_datasets.py, without its removal of HTML.
#[test]
fn stackexchange_questions_give_a_pair_for_every_two_answers() {
    let row = json!({"qid": 1, "question": "q", "answers": [{"text": "a", "pm_score": 2},
        {"text": "b", "pm_score": 5}, {"text": "c", "pm_score": 2}]});
    let prompt = "\n\nHuman: q\n\nAssistant:";
    let expected = [[prompt, " b", " a"], [prompt, " c", " a"], [prompt, " b", " c"]];
    assert_eq!(pairs(row.clone()), expected);
    assert_eq!(taken(row), [[prompt, " b"]]);
    let one = json!({"question": "q", "answers": [{"text": "a", "pm_score": 2}]});
    let parsed = parse_as(&one, RowKind::Preference, &Columns::default()).unwrap();
    assert_eq!(parsed.dropped, Some(Reason::NoPair));
    // 300 answers make 44,850 pairs, and each text is in 299 of them.
    let answers: Vec<_> = (0..300).map(|i| json!({"text": "a".repeat(3000), "pm_score": i})).collect();
    let error = refused(json!({"question": "q", "answers": answers}), RowKind::Preference);
    assert!(error.contains("300 answers make 44850 pairs with texts of more than 256 MiB"), "{error}");
}

#[test]
fn ultrafeedback_pairs_the_best_completion_with_the_worst() {
    let item = |text: &str, score: f64| json!({"response": text, "overall_score": score, "model": "m"});
    let row = json!({"source": "s", "instruction": "q", "completions": [item("a", 3.0), item("b", 8.5), item("c", 1.0)]});
    let [b, c] = ["b", "c"].map(|text| json!([turn("assistant", text)]));
    assert_eq!(pairs(row), [[json!([turn("user", "q")]), b, c]]);
    // The binarized set has the conversation of the chosen side as `messages` too.
    let chosen = json!([turn("user", "q"), turn("assistant", "a")]);
    let row = json!({"prompt": "q", "messages": chosen, "chosen": chosen,
        "rejected": [turn("user", "q"), turn("assistant", "b")], "score_chosen": 8.0});
    assert_eq!(pairs(row)[0][0], json!([turn("user", "q")]));
}

#[test]
fn a_column_that_looks_like_a_part_of_the_prompt_is_refused_unless_its_text_is_used() {
    let pair = |column: &str, value: Value| {
        let mut row = json!({"prompt": "p", "chosen": "a", "rejected": "b"});
        row[column] = value;
        parse_as(&row, RowKind::Preference, &Columns::default()).map_err(|e| e.to_string())
    };
    for column in ["question", "instruction", "input", "system", "context", "history", "messages", "System"] {
        let error = pair(column, json!("who?")).unwrap_err();
        let start =
            format!("f.jsonl:7: the column `{column}` is not used: it looks like a part of the prompt; ");
        assert!(error.starts_with(&start), "{error}");
        assert!(error.contains(&format!("data.ignore_columns = [\"{column}\"]")), "{error}");
        assert!(column == "history" || error.contains("data.columns = {"), "{error}");
        for nothing in [json!(null), json!(""), json!([])] {
            assert!(pair(column, nothing).is_ok());
        }
    }
    assert!(pair("question", json!("p")).is_ok(), "its text is the prompt");
    assert!(pair("score", json!(3)).is_ok());
    assert!(pair("images", json!([{"path": "a.png"}])).unwrap_err().contains("only text is trained on"));
    let error = refused(
        json!({"messages": [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "q"}]}]}),
        RowKind::Supervised,
    );
    assert!(error.contains("`messages[0].content` is not used: it has a part of type \"image\""), "{error}");
    let row = json!({"text": "t", "instruction": "q"});
    assert!(refused(row, RowKind::Supervised).contains("`instruction` is not used"));
}

#[test]
fn labelled_completions_are_rows_of_kto_and_of_nothing_else() {
    for label in [json!(true), json!(false), json!(1), json!("False")] {
        let row = json!({"prompt": "p", "completion": "c", "label": label});
        assert!(
            refused(row.clone(), RowKind::Supervised)
                .starts_with("f.jsonl:7: `prompt`, `completion` and `label` are rows for method = \"kto\"")
        );
        let desirable = json!([true, 1]).as_array().unwrap().contains(&label);
        let record = parse_as(&row, RowKind::Unpaired, &Columns::default()).unwrap().records.remove(0);
        assert_eq!(
            (record.label, record.shape.to_string()),
            (desirable, "prompt, completion (plain text)".into())
        );
    }
    let row = json!({"prompt": "p", "completion": "c", "label": "physics"});
    assert!(parse_as(&row, RowKind::Supervised, &Columns::default()).is_ok());
    assert!(refused(row, RowKind::Unpaired).contains("`label` should be true or false"));
    let row = json!({"prompt": "p", "completion": "c", "label": null});
    assert!(refused(row, RowKind::Unpaired).contains("`prompt`, `completion` and `label`"));
    let row = json!({"prompt": "p", "completion": "c"});
    assert!(
        refused(row, RowKind::Unpaired).contains("or `chosen` and `rejected`, found `prompt`, `completion`")
    );
    let row = json!({"prompt": "p", "chosen": "c", "label": true});
    assert!(refused(row, RowKind::Unpaired).contains("or `chosen` and `rejected`, found `prompt`, `chosen`"));
}

#[test]
fn pairs_are_two_labelled_completions_for_kto() {
    let labelled = |row: Value| {
        let parsed = parse_as(&row, RowKind::Unpaired, &Columns::default()).unwrap();
        let labels: Vec<_> = parsed.records.iter().map(|record| record.label).collect();
        assert!(parsed.records.iter().all(|record| record.shape.to_string().contains("chosen, rejected")));
        (labels, parts(&row, RowKind::Unpaired, &Columns::default()))
    };
    let both = || vec![true, false];
    let row = json!({"prompt": "p", "chosen": "c", "rejected": "d", "score": 1});
    assert_eq!(labelled(row), (both(), vec![vec![json!("p"), json!("c")], vec![json!("p"), json!("d")]]));
    // Without a prompt it is the common beginning, as for DPO.
    let (labels, found) = labelled(json!({"chosen": "The same start", "rejected": "The same end"}));
    let expected =
        [["The same", " start"], ["The same", " end"]].map(|texts| texts.map(|text| json!(text)).to_vec());
    assert_eq!((labels, found), (both(), expected.to_vec()));
    // Shapes of published sets have pairs.
    let (labels, found) = labelled(json!({"system": "s", "question": "q", "chosen": "a", "rejected": "b"}));
    assert_eq!((labels, &found[1][1]), (both(), &json!([turn("assistant", "b")])));
    // A label of its own wins.
    let row = json!({"prompt": "p", "completion": "x", "label": false, "chosen": "c", "rejected": "d"});
    let parsed = parse_as(&row, RowKind::Unpaired, &Columns::default()).unwrap();
    assert_eq!((parsed.records.len(), parsed.records[0].label), (1, false));
    // A label that is mapped and not read is refused.
    let names = [("label".to_owned(), "good".to_owned())].into_iter().collect();
    let row = json!({"prompt": "p", "chosen": "c", "rejected": "d", "good": true});
    let error = parse_as(&row, RowKind::Unpaired, &Columns { names, ..Columns::default() }).unwrap_err();
    assert!(error.contains("data.columns maps it to `label`, which such rows are not read by"), "{error}");
}

#[test]
fn mapped_columns_are_read_under_their_keys() {
    let names = |names: &[(&str, &str)]| names.iter().map(|(k, c)| (k.to_string(), c.to_string())).collect();
    let columns = Columns {
        names: names(&[("prompt", "question"), ("chosen", "good"), ("rejected", "bad")]),
        ..Columns::default()
    };
    let row = json!({"question": "q", "good": "a", "bad": "b"});
    assert_eq!(parts(&row, RowKind::Preference, &columns), [["q", "a", "b"]]);
    let error = parse_as(&json!({"question": "q", "good": "a"}), RowKind::Preference, &columns).unwrap_err();
    assert_eq!(
        error,
        "f.jsonl:7: no column `bad`, which data.columns.rejected names; found `question`, `good`"
    );
    let both = json!({"prompt": "p", "question": "q", "good": "a", "bad": "b"});
    let error = parse_as(&both, RowKind::Preference, &columns).unwrap_err();
    assert!(error.contains("the column `prompt` is not used"), "{error}");
    let columns = Columns { ignored: vec!["prompt".into()], ..columns };
    assert_eq!(parts(&both, RowKind::Preference, &columns), [["q", "a", "b"]]);
    // A prompt for generation keeps the whole row for its judges.
    let columns = Columns { names: names(&[("prompt", "question")]), ..Columns::default() };
    let record = parse_as(&json!({"question": "q", "context": "c"}), RowKind::Prompt, &columns).unwrap();
    assert_eq!(json!(record.records[0].row), json!({"context": "c", "prompt": "q"}));
}

#[test]
fn a_named_shape_says_what_its_rows_lack() {
    let of = |shape| Columns { shape: Some(shape), ..Columns::default() };
    let row = json!({"prompt": "p", "chosen": "a", "rejected": "b"});
    for (name, shape) in NamedShape::NAMES {
        let error = parse_as(&row, RowKind::Preference, &of(shape)).unwrap_err();
        assert!(error.contains(&format!("not a row of the shape \"{name}\": ")), "{error}");
    }
    let error = parse_as(&row, RowKind::Preference, &of(NamedShape::Orca)).unwrap_err();
    assert!(error.contains("`question` is missing, found `prompt`, `chosen`, `rejected`"), "{error}");
}

#[test]
fn rows_without_completions_give_no_pair() {
    for row in [json!({"instruction": "i", "completions": []}), json!({"question": "q", "answers": []})] {
        let parsed = parse_as(&row, RowKind::Preference, &Columns::default()).unwrap();
        assert_eq!((parsed.records.len(), parsed.dropped), (0, Some(Reason::NoPair)), "{row}");
    }
}

#[test]
fn pairs_of_sharegpt_are_no_demonstrations() {
    let said = |from: &str, value: &str| json!({"from": from, "value": value});
    let turns = [said("human", "q"), said("gpt", "a"), said("human", "r")];
    let row = json!({"conversations": turns, "chosen": said("gpt", "b"), "rejected": said("gpt", "c")});
    assert!(refused(row.clone(), RowKind::Supervised).contains("data.take"));
    assert_eq!(taken(row).len(), 1);
}

#[test]
fn labelled_conversations_are_refused() {
    let messages = json!([turn("user", "q"), turn("assistant", "a")]);
    for key in ["label", "kto_tag"] {
        let error = refused(json!({"messages": messages, key: false}), RowKind::Supervised);
        assert!(error.contains(&format!("`messages` and `{key}` are rows for method = \"kto\"")), "{error}");
    }
    // A number may be the label of a classification.
    demonstrations(json!({"messages": messages, "label": 1}));
}

#[test]
fn a_mapped_column_that_no_key_reads_is_refused() {
    let names = [("text".to_string(), "question".to_string())].into();
    let columns = Columns { names, ..Columns::default() };
    let row = json!({"question": "q", "prompt": "p", "chosen": "a", "rejected": "b"});
    let error = parse_as(&row, RowKind::Preference, &columns).unwrap_err();
    assert!(error.contains("`question` is not used: data.columns maps it to `text`"), "{error}");
}

#[test]
fn missing_texts_are_named() {
    let error = refused(json!({"prompt": "p", "chosen": null, "rejected": "b"}), RowKind::Preference);
    assert!(error.contains("`chosen` (null)"), "{error}");
    let row = json!({"messages": [{"role": "user", "value": "q"}, {"role": "assistant", "value": "a"}]});
    let error = refused(row, RowKind::Supervised);
    assert!(error.contains("`messages[0]`: no `content`, found `value`"), "{error}");
}
