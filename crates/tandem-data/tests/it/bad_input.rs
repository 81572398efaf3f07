//! Errors in data files: the file, line and key, what was expected and what was found.

use std::path::Path;

use crate::fixture::tokenizer_with;
use tandem_data::prepare::prepare;
use tandem_data::progress::Silent;
use tandem_data::record::RowKind;
use tandem_data::report::Reason;
use tandem_data::row::{LossMask, RowOptions};
use tandem_data::source::Sources;
use tandem_data::tokenizer::Tokenizer;

/// Returns the message that `content` as `name` causes, without `{dir}/`.
fn error_of(name: &str, content: &str, options: &RowOptions) -> String {
    let (_tokenizer_folder, tokenizer) = tokenizer_with(false, None);
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join(name);
    std::fs::write(&path, content).unwrap();
    let cache = folder.path().join("cache");
    let error = prepare(&Sources::from(path), &tokenizer, options, &cache, &Silent).unwrap_err();
    let left: Vec<_> = std::fs::read_dir(cache).unwrap().map(|e| e.unwrap().file_name()).collect();
    assert!(
        left.iter().all(|name| name.to_string_lossy().ends_with(".lock")),
        "nothing half-written stays: {left:?}"
    );
    error.to_string().replace(&format!("{}/", folder.path().display()), "")
}

fn preference(content: &str) -> String {
    error_of("data.jsonl", content, &RowOptions::new(RowKind::Preference))
}

fn supervised(content: &str) -> String {
    error_of("data.jsonl", content, &RowOptions::new(RowKind::Supervised))
}

const GOOD: &str = r#"{"prompt": "a", "chosen": "b", "rejected": "c"}"#;

#[test]
fn a_broken_line_is_named() {
    let error = preference(&format!("{GOOD}\n\n{{\"prompt\": \"a\", \"chosen\": \n{GOOD}\n"));
    assert!(error.starts_with("data.jsonl:3: not valid JSON: EOF while parsing a value"), "{error}");
    let error = preference(&format!("{GOOD}\n[1]\n"));
    assert_eq!(error, "data.jsonl:2: `row` should be a JSON object, found a list: [1]");
    let error = error_of("data.json", &format!("[{GOOD},\n{GOOD}"), &RowOptions::new(RowKind::Preference));
    assert!(error.starts_with("data.json:2: not valid JSON: the file ends inside the array"), "{error}");
}

#[test]
fn a_missing_column_is_named_with_the_nearest_key() {
    let error = preference(&format!("{GOOD}\n{}", r#"{"prompt": "a", "choosen": "b", "rejected": "c"}"#));
    assert!(error.starts_with("data.jsonl:2: expected the keys `chosen` and `rejected`"), "{error}");
    assert!(error.contains("found `prompt`, `choosen`, `rejected`"), "{error}");
    assert!(error.ends_with("did you mean `chosen` where it says `choosen`?"), "{error}");

    let error = supervised(GOOD);
    assert!(error.contains("expected the keys `text`, `messages`, or `prompt` and `completion`"), "{error}");
    assert!(error.contains("method = \"dpo\""), "{error}");
    let error = preference(r#"{"messages": [{"role": "user", "content": "a"}]}"#);
    assert!(error.contains("method = \"sft\""), "{error}");
    let error = preference(r#"{"prompt": "a", "completion": "b", "label": true}"#);
    assert!(error.contains("these are labelled completions, which method = \"kto\" trains on"), "{error}");
    assert!(preference("{}").contains("found none"));

    let labelled = |row| error_of("data.jsonl", row, &RowOptions::new(RowKind::Unpaired));
    let error = labelled(r#"{"prompt": "a", "completion": "b"}"#);
    assert!(error.contains("found `prompt`, `completion`;"), "{error}");
    let error = labelled(r#"{"prompt": "a", "completion": "b", "label": null}"#);
    assert!(error.contains("`label` (null)"), "{error}");
}

#[test]
fn messages_that_share_no_prompt_are_told_from_a_prompt_of_another_kind() {
    let chosen = r#""chosen": [{"role": "assistant", "content": "b"}], "rejected": [{"role": "assistant", "content": "c"}]"#;
    let error = preference(&format!("{{{chosen}}}"));
    assert!(error.ends_with("; add a `prompt` key, or begin both with the same messages"), "{error}");
    let error = preference(&format!("{{\"prompt\": \"a\", {chosen}}}"));
    assert!(error.contains("; `prompt` is a text: make it a list of messages"), "{error}");
}

#[test]
fn a_wrong_type_is_named_with_its_path() {
    let error = preference(r#"{"prompt": "a", "chosen": 3, "rejected": "c"}"#);
    assert_eq!(error, "data.jsonl:1: `chosen` should be a string or a list of messages, found a number: 3");
    let error =
        preference(r#"{"prompt": "a", "chosen": "b", "rejected": [{"role": "user", "content": "c"}]}"#);
    assert!(error.contains("`rejected` should be a string, as the keys before it"), "{error}");
    let error =
        supervised(r#"{"messages": [{"role": "user", "content": "a"}, {"role": 1, "content": "a"}]}"#);
    assert_eq!(error, "data.jsonl:1: `messages[1].role` should be a string, found a number: 1");
    let error = supervised(r#"{"messages": [{"role": "user", "content": {"a": 1}}]}"#);
    assert!(error.contains("`messages[0].content` should be a string, found an object"), "{error}");
    let error = supervised(r#"{"messages": []}"#);
    assert!(error.contains("a non-empty list of messages"), "{error}");
    let error = supervised(r#"{"text": "a", "chat_template_kwargs": 1}"#);
    assert!(error.contains("`chat_template_kwargs` should be an object"), "{error}");
}

#[test]
fn rows_of_different_shapes_are_refused() {
    let error = preference(&format!("{GOOD}\n{}", r#"{"chosen": "ab", "rejected": "ac"}"#));
    assert!(error.starts_with("data.jsonl:2: this row is chosen, rejected (plain text), but the first row"));
    assert!(error.contains("(data.jsonl:1) is prompt, chosen, rejected (plain text)"), "{error}");
    let conversation = r#"{"chosen": [{"role": "user", "content": "a"}], "rejected": [{"role": "assistant", "content": "b"}]}"#;
    assert!(preference(conversation).contains("no message in common"));
}

#[test]
fn an_empty_data_set_is_refused() {
    for content in ["", "\n\n", "[]"] {
        assert_eq!(preference(content), "no rows in data.jsonl: expected at least one row");
    }
}

#[test]
fn rows_that_all_fall_away_are_explained() {
    let options = RowOptions { max_length: Some(2), ..RowOptions::new(RowKind::Preference) };
    let row = r#"{"prompt": "a long prompt indeed", "chosen": "b", "rejected": "c"}"#;
    let error = error_of("data.jsonl", &format!("{row}\n{row}\n"), &options);
    assert!(error.contains("no row is left of data.jsonl"), "{error}");
    assert!(error.contains("2 rows (100.0 %) dropped: the prompt alone fills max_length"), "{error}");
    assert!(error.contains("data.jsonl:1, data.jsonl:2"), "{error}");
}

#[test]
fn a_missing_file_or_template_is_named() {
    let (folder, tokenizer) = tokenizer_with(false, None);
    let options = RowOptions::new(RowKind::Supervised);
    let missing = Sources::from(folder.path().join("none.jsonl"));
    let error = prepare(&missing, &tokenizer, &options, folder.path(), &Silent).unwrap_err();
    let text = error.to_string();
    assert!(text.starts_with("reading ") && text.ends_with("none.jsonl"), "{text}");
    assert!(std::error::Error::source(&error).is_some(), "the system's answer is the cause");
    let other = tempfile::tempdir().unwrap();
    std::fs::write(other.path().join("tokenizer.model"), "").unwrap();
    let error = Tokenizer::from_folder(other.path()).err().unwrap().to_string();
    assert!(error.contains("tokenizer.model: is not read: tokenizer.json is needed"), "{error}");
    let error = Tokenizer::from_folder(Path::new("/nowhere")).err().unwrap().to_string();
    assert_eq!(error, "tokenizer /nowhere: no such folder");

    std::fs::remove_file(folder.path().join("chat_template.jinja")).unwrap();
    let tokenizer = Tokenizer::from_folder(folder.path()).unwrap();
    let data = folder.path().join("data.jsonl");
    std::fs::write(&data, r#"{"messages": [{"role": "user", "content": "a"}]}"#).unwrap();
    let error = prepare(&Sources::from(data), &tokenizer, &options, folder.path(), &Silent);
    let error = error.unwrap_err().to_string();
    assert!(error.contains("data.jsonl:1: ") && error.contains("no chat template"), "{error}");
}

#[test]
fn what_a_template_raises_is_passed_on_with_the_row() {
    let (folder, _) = tokenizer_with(false, Some("markers"));
    let tokenizer = Tokenizer::from_folder(folder.path()).unwrap();
    let data = folder.path().join("data.jsonl");
    let row = r#"{"messages": [{"role": "user", "content": "a"}, {"role": "system", "content": "b"}]}"#;
    std::fs::write(&data, format!("\n{row}")).unwrap();
    let options = RowOptions::new(RowKind::Supervised);
    let error = prepare(&Sources::from(data), &tokenizer, &options, folder.path(), &Silent);
    let error = error.unwrap_err().to_string();
    assert!(
        error.contains("data.jsonl:2: chat template: line 4: The system message must come first"),
        "{error}"
    );
}

#[test]
fn a_template_that_does_not_show_the_assistants_words_stops_the_run() {
    let (folder, _) = tokenizer_with(false, None);
    let template = "{{ messages|length }} messages: {{ messages[0].content }}";
    std::fs::write(folder.path().join("chat_template.jinja"), template).unwrap();
    let tokenizer = Tokenizer::from_folder(folder.path()).unwrap();
    let data = folder.path().join("data.jsonl");
    let row = r#"{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}"#;
    std::fs::write(&data, row).unwrap();
    let sources = Sources::from(data);
    let mut options = RowOptions::new(RowKind::Supervised);
    let error = prepare(&sources, &tokenizer, &options, folder.path(), &Silent).unwrap_err().to_string();
    assert!(error.contains("data.jsonl:1: ") && error.contains("{% generation %}"), "{error}");
    options.loss_on = LossMask::All;
    assert_eq!(prepare(&sources, &tokenizer, &options, folder.path(), &Silent).unwrap().num_rows(), 1);
}

#[test]
fn a_margin_is_a_number() {
    let row = |margin: &str| {
        format!("{{\"prompt\": \"a\", \"chosen\": \"b\", \"rejected\": \"c\", \"margin\": {margin}}}")
    };
    let reward = |content: &str| error_of("data.jsonl", content, &RowOptions::new(RowKind::Reward));
    let error = reward(&format!("{}\n{}\n{}", row("0.5"), row("null"), row("\"1\"")));
    assert_eq!(error, "data.jsonl:3: `margin` should be a number, found a string: \"1\"");
    let error = reward(&row("-1e39"));
    assert!(
        error.starts_with("data.jsonl:1: `margin` should be a number that f32 holds, found a number"),
        "{error}"
    );
}

#[test]
fn a_prompt_has_a_token_and_leaves_room_for_the_answer() {
    let options = RowOptions { max_length: Some(2), ..RowOptions::new(RowKind::Prompt) };
    let prompts = |content: &str| error_of("data.jsonl", content, &options);
    let error = prompts("{\"prompt\": \"\"}\n{\"prompt\": \"one two three four five six\"}\n");
    assert!(error.contains("1 row (50.0 %) dropped: the prompt has no token [data.jsonl:1]"), "{error}");
    assert!(error.contains("no room for max_new_tokens within max_length [data.jsonl:2]"), "{error}");
    let error = prompts("{\"promt\": \"a\"}\n");
    assert!(error.contains("did you mean `prompt` where it says `promt`?"), "{error}");
}

#[test]
fn a_message_without_content_is_named_with_what_it_has() {
    let messages = |key: &str, message: &str| match key {
        "messages" => format!(r#"{{"messages": [{message}, {{"role": "assistant", "content": "a"}}]}}"#),
        "prompt" => {
            format!(r#"{{"prompt": [{message}], "chosen": [{GOOD_ANSWER}], "rejected": [{GOOD_ANSWER}]}}"#)
        }
        "chosen" => {
            format!(r#"{{"prompt": [{GOOD_ANSWER}], "chosen": [{message}], "rejected": [{GOOD_ANSWER}]}}"#)
        }
        _ => format!(r#"{{"prompt": [{GOOD_ANSWER}], "chosen": [{GOOD_ANSWER}], "rejected": [{message}]}}"#),
    };
    for (message, found) in [
        (r#"{"role": "user", "contnt": "hi"}"#, "`contnt`"),
        (r#"{"role": "user", "content": null, "name": "n"}"#, "`name`"),
        (r#"{"role": "assistant", "tool_calls": []}"#, "`tool_calls`"),
        (r#"{"role": "user"}"#, "`role` alone"),
    ] {
        for key in ["messages", "prompt", "chosen", "rejected"] {
            let row = messages(key, message);
            let error = if key == "messages" { supervised(&row) } else { preference(&row) };
            let expected = format!("data.jsonl:1: `{key}[0]`: no `content`, found {found}; a message is");
            assert!(error.starts_with(&expected), "{error}");
        }
    }
    let prompts = RowOptions::new(RowKind::Prompt);
    let error = error_of("data.jsonl", r#"{"prompt": [{"role": "user", "text": "hi"}]}"#, &prompts);
    assert!(error.contains("`prompt[0]`: no `content`, found `text`"), "{error}");
    let error = supervised(r#"{"messages": [{"role": "user", "content": [{"type": "text", "txt": "a"}]}]}"#);
    assert!(error.contains("`messages[0].content[0].text` should be a string, found nothing"), "{error}");
}

const GOOD_ANSWER: &str = r#"{"role": "assistant", "content": "a"}"#;

/// The places of a file's rows, or the error of the first that is not read.
fn read_with(template: &str, content: &str, kind: RowKind) -> Result<Vec<String>, String> {
    let (folder, _) = tokenizer_with(false, None);
    std::fs::write(folder.path().join("chat_template.jinja"), template).unwrap();
    let tokenizer = Tokenizer::from_folder(folder.path()).unwrap();
    let data = folder.path().join("data.jsonl");
    std::fs::write(&data, content).unwrap();
    let cache = prepare(&Sources::from(data), &tokenizer, &RowOptions::new(kind), folder.path(), &Silent);
    let short = |text: String| text.replace(&format!("{}/", folder.path().display()), "");
    match cache {
        Ok(cache) => Ok(cache.report_lines().into_iter().map(short).collect()),
        Err(error) => Err(short(error.to_string())),
    }
}

#[test]
fn a_role_is_one_that_templates_know() {
    let template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}";
    let row = |role: &str| {
        format!(
            r#"{{"messages": [{{"role": "user", "content": "q"}}, {{"role": "{role}", "content": "a"}}, {GOOD_ANSWER}]}}"#
        )
    };
    for role in
        ["system", "developer", "user", "assistant", "model", "tool", "function", "ipython", "observation"]
    {
        read_with(template, &row(role), RowKind::Supervised)
            .unwrap_or_else(|error| panic!("{role}: {error}"));
    }
    for (role, nearest) in [("usr", "user"), ("asistant", "assistant"), ("User", "user")] {
        let error = read_with(template, &row(role), RowKind::Supervised).unwrap_err();
        assert!(error.starts_with("data.jsonl:1: `messages[1].role` should be \"system\", "), "{error}");
        let expected = format!("that the chat template names, found {role:?}; did you mean {nearest:?}?");
        assert!(error.ends_with(&expected), "{error}");
    }
    let answer = format!(
        r#"{{"prompt": [{GOOD_ANSWER}], "chosen": [{GOOD_ANSWER}], "rejected": [{{"role": "narrator", "content": "b"}}]}}"#
    );
    let error = read_with(template, &answer, RowKind::Preference).unwrap_err();
    assert!(error.contains("`rejected[0].role` should be"), "{error}");
    let named = format!("{template}{{% if messages[0].role == 'narrator' %}}.{{% endif %}}");
    read_with(&named, &answer, RowKind::Preference).expect("its template names it");
}

#[test]
fn a_call_of_a_tool_needs_no_content() {
    let template = "{% for m in messages %}{{ m.role }}: {{ m.content or m.tool_calls }}\n{% endfor %}";
    let call = r#"{"role": "assistant", "content": null, "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": {}}}]}"#;
    let result = r#"{"role": "tool", "tool_call_id": "1", "name": "f", "content": "2"}"#;
    let last = r#"{"role": "assistant", "content": "b", "reasoning_content": "r", "thinking": "t"}"#;
    let row = format!(r#"{{"messages": [{{"role": "user", "content": "q"}}, {call}, {result}, {last}]}}"#);
    read_with(template, &row, RowKind::Supervised).unwrap();
}

#[test]
fn pairs_without_a_scored_token_are_dropped_and_equal_answers_reported() {
    let chat = |prompt: &str, chosen: &str, rejected: &str| {
        let message = |role, text| format!(r#"[{{"role": "{role}", "content": "{text}"}}]"#);
        let [prompt, chosen, rejected] =
            [message("user", prompt), message("assistant", chosen), message("assistant", rejected)];
        format!(r#"{{"prompt": {prompt}, "chosen": {chosen}, "rejected": {rejected}}}"#)
    };
    let rows = [chat("x", "a", "a"), chat("x", "a", "b"), chat("x", "b", "b")].join("\n");
    let template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}";
    let lines = read_with(template, &rows, RowKind::Preference).unwrap();
    assert!(lines[0].starts_with("3 rows read, 3 kept"), "{lines:?}");
    assert!(
        lines[1].starts_with("2 rows (66.7 %) have the same tokens as chosen and rejected")
            && lines[1].ends_with("[data.jsonl:1, data.jsonl:3]"),
        "{lines:?}"
    );
    // The template prints nothing of such messages.
    let error = read_with("{{ messages[0].nothing }}", &rows, RowKind::Preference).unwrap_err();
    assert!(error.contains("3 rows (100.0 %) dropped: no token to score"), "{error}");
    let labelled = r#"{"prompt": [{"role": "user", "content": "x"}], "completion": [{"role": "assistant", "content": "a"}], "label": true}"#;
    let error = read_with("{{ messages[0].nothing }}", labelled, RowKind::Unpaired).unwrap_err();
    assert!(error.contains("1 row (100.0 %) dropped: no token to score"), "{error}");
    // A prompt without a token of its own is a prompt without text.
    let template = "{% for m in messages if m.role == 'assistant' %}{{ m.content }}, \n{% endfor %}";
    let lines = read_with(template, &chat("x", "a b", "b c"), RowKind::Preference).unwrap();
    assert!(lines[1].starts_with("1 row (100.0 %) has an empty prompt"), "{lines:?}");
}

#[test]
fn answers_that_the_cut_makes_equal_are_reported() {
    let (folder, tokenizer) = tokenizer_with(false, None);
    let data = folder.path().join("data.jsonl");
    std::fs::write(&data, r#"{"prompt": "a", "chosen": " b c d e", "rejected": " b c d f"}"#).unwrap();
    let options = RowOptions { max_length: Some(3), ..RowOptions::new(RowKind::Preference) };
    let cache = prepare(&Sources::from(data), &tokenizer, &options, folder.path(), &Silent).unwrap();
    let report = cache.report();
    let counts = [Reason::Truncated, Reason::RejectedTruncated, Reason::SameAnswers]
        .map(|reason| report.count(reason));
    assert_eq!(counts, [1, 1, 1]);
    let text = cache.report_lines().join("\n");
    assert!(text.contains("1 row (100.0 %) has a rejected answer cut at max_length"), "{text}");
    assert!(text.contains("1 row (100.0 %) has the same tokens as chosen and rejected"), "{text}");
}

#[test]
fn a_template_that_never_reads_the_messages_is_refused() {
    let row = r#"{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}"#;
    for (template, found) in [("static text", "\"static text\""), ("", "\"\"")] {
        let error = read_with(template, row, RowKind::Supervised).unwrap_err();
        let expected = format!(
            "data.jsonl:1: chat template: the template `default` never reads `messages`, so every conversation would be \
             the same text; found {found}; give the model's own template, or data.chat_template"
        );
        assert_eq!(error, expected);
    }
    // Rows of text do not need it.
    read_with("static text", r#"{"text": "a b c"}"#, RowKind::Supervised).unwrap();
}
