//! Chat templates: TRL's, as transformers renders them; the assistant's turns; bounds of a run.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::ops::Range;
use std::path::{Path, PathBuf};

use crate::fixture::message_of;
use serde_json::Value;
use tandem_data::chat_template::{ChatTemplate, RenderOptions};
use tandem_data::record::Message;

fn golden(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../goldens/chat").join(name)
}

fn template(source: &str) -> ChatTemplate {
    let special =
        [("bos_token", "<s>"), ("eos_token", "</s>"), ("pad_token", "<pad>"), ("unk_token", "<unk>")];
    let special = special.map(|(name, token)| (name.to_string(), token.to_string())).to_vec();
    ChatTemplate::new(vec![("default".into(), source.into())], special).unwrap()
}

/// A conversation of `chat_golden.py`.
struct Case {
    messages: Vec<Message>,
    tools: Option<Value>,
    kwargs: Option<serde_json::Map<String, Value>>,
}

impl Case {
    fn options(&self, add_generation_prompt: bool) -> RenderOptions<'_> {
        RenderOptions { tools: self.tools.as_ref(), kwargs: self.kwargs.as_ref(), add_generation_prompt }
    }
}

fn cases() -> BTreeMap<String, Case> {
    let cases: Value = serde_json::from_slice(&std::fs::read(golden("cases.json")).unwrap()).unwrap();
    let case = |case: &Value| Case {
        messages: case["messages"].as_array().unwrap().iter().map(message_of).collect(),
        tools: case.get("tools").cloned(),
        kwargs: case.get("kwargs").and_then(Value::as_object).cloned(),
    };
    cases.as_object().unwrap().iter().map(|(name, value)| (name.clone(), case(value))).collect()
}

/// A template's render of a case by transformers.
struct Render {
    template: String,
    case: String,
    /// `None` where the template refuses the case.
    text: Option<String>,
    with_prompt: Option<String>,
    ranges: Option<Vec<Range<usize>>>,
}

fn renders() -> Vec<Render> {
    // The goldens hold the format where a date stands.
    let today = |text: &str| {
        let mut text = text.to_string();
        for form in ["%Y-%m-%d", "%d %b %Y"] {
            let source = format!("{{{{ strftime_now('{form}') }}}}");
            let date = template(&source).render(&[], RenderOptions::default()).unwrap();
            text = text.replace(&format!("@{form}@"), &date);
        }
        text
    };
    let changed = |difference: &Value, base: &str| {
        let base: Vec<char> = base.chars().collect();
        let [start, end] = [0, 2].map(|i| difference[i].as_u64().unwrap() as usize);
        let part = |range: Range<usize>| base[range].iter().collect::<String>();
        part(0..start) + difference[1].as_str().unwrap() + &part(base.len() - end..base.len())
    };
    let file = std::fs::read_to_string(golden("renders.jsonl")).unwrap();
    let rows: Vec<Value> = file.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let name = |row: &Value, key: &str| row[key].as_str().unwrap().to_string();
    let originals: BTreeMap<_, _> = rows
        .iter()
        .filter_map(|row| Some(((name(row, "template"), name(row, "case")), row["text"].as_str()?)))
        .collect();
    let render = |row: &Value| {
        let (template, case) = (name(row, "template"), name(row, "case"));
        let base = template.trim_end_matches("_training").to_string();
        let original = originals.get(&(base, case.clone())).copied().unwrap_or_default();
        let whole = |key: &str| row[key].is_array().then(|| changed(&row[key], original));
        let text = row["text"].as_str().map(str::to_string).or_else(|| whole("difference"));
        let ranges = row["ranges"].as_array().zip(text.as_ref()).map(|(ranges, text)| {
            // Python counts characters.
            let mut bytes: Vec<usize> = text.char_indices().map(|(i, _)| i).collect();
            bytes.push(text.len());
            let at = |range: &Value, i: usize| bytes[range[i].as_u64().unwrap() as usize];
            ranges.iter().map(|r| at(r, 0)..at(r, 1)).collect()
        });
        let prompt = whole("with_prompt").map(|text| today(&text));
        Render { template, case, text, with_prompt: prompt, ranges }
    };
    // A date in this format is as long as the format's mark, so ranges stay where they are.
    assert_eq!(today("@%Y-%m-%d@").len(), 10);
    let with_date = |render: Render| Render { text: render.text.map(|text| today(&text)), ..render };
    rows.iter().map(render).map(with_date).collect()
}

/// Text of a template of TRL 1.16.0. They are another project's code, so the repository has none of them.
fn source(name: &str) -> String {
    let folder = std::env::var_os("TANDEM_TEST_TEMPLATES")
        .expect("TANDEM_TEST_TEMPLATES names the folder trl/chat_templates of the package trl 1.16.0");
    std::fs::read_to_string(Path::new(&folder).join(format!("{name}.jinja"))).unwrap()
}

/// Returns the place where two texts part, for messages.
fn parting(found: &str, expected: &str) -> String {
    let same: usize =
        found.chars().zip(expected.chars()).take_while(|(a, b)| a == b).map(|(a, _)| a.len_utf8()).sum();
    let next = |text: &str| text[same..].chars().take(60).collect::<String>();
    format!("at {same}: {:?} instead of {:?}", next(found), next(expected))
}

#[test]
#[ignore = "reads TRL's templates: runs in .ci/nightly"]
fn every_template_of_trl_renders_as_in_transformers() {
    let cases = cases();
    let mut failures = String::new();
    let mut compared = 0;
    for render in renders().iter().filter(|render| render.ranges.is_none()) {
        let Render { template: name, case, text, with_prompt, .. } = render;
        let template = template(&source(name));
        for (expected, prompt) in [(text, false), (with_prompt, true)] {
            let found = template.render(&cases[case].messages, cases[case].options(prompt));
            compared += usize::from(expected.is_some());
            match (found, expected) {
                (Ok(found), Some(expected)) if found != *expected => {
                    let _ = writeln!(failures, "{name} {case} {prompt}: {}", parting(&found, expected));
                }
                (Err(e), Some(_)) => drop(writeln!(failures, "{name} {case} {prompt}: {e}")),
                (Ok(found), None) if text.is_none() => {
                    let _ = writeln!(failures, "{name} {case} {prompt}: not refused: {found:?}");
                }
                _ => {}
            }
        }
    }
    assert!(failures.is_empty(), "{failures}");
    assert!(compared > 1300, "{compared}");
}

#[test]
#[ignore = "reads TRL's templates: runs in .ci/nightly"]
fn generation_blocks_are_where_transformers_has_them() {
    let cases = cases();
    let mut failures = String::new();
    let mut compared = 0;
    for render in &renders() {
        let Render { template: name, case, text: Some(text), ranges: Some(ranges), .. } = render else {
            continue;
        };
        let found =
            template(&source(name)).render_with_turns(&cases[case].messages, cases[case].options(false), &[]);
        match found {
            Ok((found, _)) if found != *text => {
                let _ = writeln!(failures, "{name} {case}: {}", parting(&found, text));
            }
            Ok((_, found)) if found != *ranges => {
                let show = |ranges: &[Range<usize>]| {
                    format!("{:?}", ranges.iter().map(|r| &text[r.clone()]).collect::<Vec<_>>())
                };
                let _ = writeln!(failures, "{name} {case}: {} instead of {}", show(&found), show(ranges));
            }
            Ok(_) => compared += 1,
            Err(e) => drop(writeln!(failures, "{name} {case}: {e}")),
        }
    }
    assert!(failures.is_empty(), "{failures}");
    assert!(compared > 500, "{compared}");
}

/// EOS tokens of GLM's `generation_config.json`: its turns have no end marker.
const GLM_ENDS: [&str; 3] = ["<|endoftext|>", "<|user|>", "<|observation|>"];

fn turns_of(name: &str, case: &Case) -> Result<(String, Vec<Range<usize>>), tandem_data::DataError> {
    let ends: Vec<String> = match name {
        "glm4moe" => GLM_ENDS.map(str::to_string).to_vec(),
        _ => vec!["</s>".into()],
    };
    template(&source(name)).render_with_turns(&case.messages, case.options(false), &ends)
}

/// Text at the start or the end of TRL's ranges that we leave out: the turn's header, and the
/// space between two turns.
const TRL_ONLY: [(&str, &str); 6] = [
    ("deepseek_r1_distill", "<｜Assistant｜>"),
    ("deepseekv3", "<｜Assistant｜>"),
    ("gptoss", "<|start|>assistant"),
    ("muse_glimmer", "<|start|>assistant"),
    ("qwen2_5", "\n"),
    ("llava_next", ""),
];

#[test]
#[ignore = "reads TRL's templates: runs in .ci/nightly"]
fn turns_are_where_trls_training_variants_mark_them() {
    let cases = cases();
    let mut failures = String::new();
    let mut compared = 0;
    let renders = renders();
    let originals = renders.iter().filter(|r| r.ranges.is_none());
    let originals: BTreeMap<_, _> =
        originals.filter_map(|r| Some(((r.template.as_str(), r.case.as_str()), r.text.as_ref()?))).collect();
    for variant in &renders {
        let (Some(text), Some(ranges)) = (&variant.text, &variant.ranges) else { continue };
        let (name, case) = (variant.template.trim_end_matches("_training"), variant.case.as_str());
        // Some variants write another text: they keep the reasoning of earlier turns.
        if originals.get(&(name, case)) != Some(&text) {
            continue;
        }
        let ours = TRL_ONLY.iter().find(|(template, _)| *template == name);
        let mut expected: Vec<&str> = Vec::new();
        let mut end = 0;
        for range in ranges.iter().filter(|range| !range.is_empty()) {
            let turn = &text[range.clone()];
            let turn = ours.map_or(turn, |(_, header)| turn.strip_prefix(header).unwrap_or(turn));
            match expected.last_mut() {
                Some(last) if end == range.start && ours.is_none() => {
                    *last = &text[end - last.len()..range.end];
                }
                _ if turn.is_empty() => {}
                _ => expected.push(turn),
            }
            end = range.end;
        }
        match turns_of(name, &cases[case]) {
            Ok((_, found)) => {
                compared += 1;
                let mut found: Vec<&str> = found.into_iter().map(|range| &text[range]).collect();
                if name == "llava_next" {
                    found.iter_mut().for_each(|turn| *turn = turn.strip_suffix(' ').unwrap_or(turn));
                }
                if found != expected {
                    let _ = writeln!(failures, "{name} {case}: {found:?} instead of {expected:?}");
                }
            }
            Err(e) => drop(writeln!(failures, "{name} {case}: {e}")),
        }
    }
    assert!(failures.is_empty(), "{failures}");
    assert!(compared > 400, "{compared}");
}

/// Every template, also those without a training variant: what the assistant said is in the loss
/// where it is in the text, and what others said is not.
#[test]
#[ignore = "reads TRL's templates: runs in .ci/nightly"]
fn the_assistants_words_are_in_the_loss_and_no_others() {
    let cases = cases();
    let mut failures = String::new();
    for render in renders().iter().filter(|r| r.ranges.is_none() && r.text.is_some()) {
        let case = &cases[&render.case];
        let (text, turns) = match turns_of(&render.template, case) {
            Ok(found) => found,
            Err(e) => {
                let _ = writeln!(failures, "{} {}: {e}", render.template, render.case);
                continue;
            }
        };
        let mut scored = String::new();
        let mut others = String::new();
        let mut at = 0;
        for turn in &turns {
            others += &text[at..turn.start];
            scored += &text[turn.clone()];
            at = turn.end;
        }
        others += &text[at..];
        let mut from = 0;
        for message in &case.messages {
            let assistant = message["role"] == "assistant";
            let content = match message.get("content") {
                Some(Value::String(text)) => text.as_str(),
                Some(parts) => parts[0]["text"].as_str().unwrap(),
                None => "",
            };
            let content = content.rsplit("</think>").next().unwrap().trim();
            let part = if assistant { &scored[from..] } else { &others[..] };
            match part.find(content) {
                Some(found) if assistant => from += found + content.len(),
                Some(_) => {}
                // Templates leave out some things, as what stands beside a tool call, and print lists
                // of parts in quotes.
                None if message["role"] == "tool" || !text.contains(content) => {}
                None => {
                    let _ = writeln!(
                        failures,
                        "{} {}: {content:?} not in {part:?}",
                        render.template, render.case
                    );
                }
            }
        }
        for word in
            ["colour is the sky", "Weather in", "And tomorrow", "Be brief", "What is 2", "degrees\": 21"]
        {
            if scored.contains(word) {
                let _ = writeln!(failures, "{} {}: {word:?} is in {scored:?}", render.template, render.case);
            }
        }
        for name in ["assistant\n", "assistant<", "user\n", "system\n"] {
            if turns.iter().any(|turn| text[turn.clone()].trim_start_matches(['<', '|']).starts_with(name)) {
                let _ = writeln!(failures, "{} {}: a header is in {scored:?}", render.template, render.case);
            }
        }
    }
    assert!(failures.is_empty(), "{failures}");
}

#[test]
fn other_templates_turns_are_found_too() {
    let messages: Vec<Message> =
        [("user", "Hi"), ("assistant", "Yes"), ("user", "Yes"), ("assistant", " No ")]
            .map(|(role, content)| message_of(&serde_json::json!({"role": role, "content": content})))
            .to_vec();
    let cases: [(&str, &[&str]); 6] = [
        // A generation prompt within the loop, as Zephyr's.
        (
            "{% for m in messages %}\n{{ '<|' + m.role + '|>\n' + m.content + eos_token }}\n\
             {% if loop.last and add_generation_prompt %}\n{{ '<|assistant|>\n' }}\n{% endif %}\n{% endfor %}",
            &["Yes</s>\n", " No </s>\n"],
        ),
        // By index.
        (
            "{% for i in range(messages|length) %}{% set m = messages[i] %}[{{ m.role }}]{{ m.content|trim }};\
             {% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}",
            &["Yes;", "No;"],
        ),
        // Within a macro and a trimmed block.
        (
            "{% macro all(ms) %}{% for m in ms %} {{ m.role }}: {{ m.content }}.{% endfor %}{% endmacro %}\
             {{ all(messages)|trim }}{% if add_generation_prompt %} assistant:{% endif %}",
            &[" Yes. ", "  No ."],
        ),
        // Without a loop of its own.
        ("{{ messages|map(attribute='content')|join(eos_token) }}{{ eos_token }}", &["Yes</s>", "No </s>"]),
        // Joined text.
        (
            "{% set ns = namespace(t='') %}{% for m in messages %}{% set ns.t = ns.t + m.role ~ ':' ~ m.content ~ '\n' %}\
             {% endfor %}{{ ns.t }}",
            &["Yes", "No"],
        ),
        // Pairs, as Llama 2's.
        (
            "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]{% else %}\
             {{ m.content }}{{ eos_token }}{% endif %}{% endfor %}",
            &["Yes</s>", " No </s>"],
        ),
    ];
    for (source, expected) in cases {
        let ends = ["</s>".to_string()];
        let (text, turns) =
            template(source).render_with_turns(&messages, RenderOptions::default(), &ends).unwrap();
        let turns: Vec<_> = turns.into_iter().map(|turn| &text[turn]).collect();
        assert_eq!(turns, expected, "{source}: {text:?}");
    }
    let silent = template("{{ messages|length }}");
    let error = silent.render_with_turns(&messages, RenderOptions::default(), &[]).unwrap_err().to_string();
    assert!(error.contains("{% generation %}"), "{error}");
}

#[test]
fn a_hostile_template_is_an_error() {
    let doubling = "{% set ns = namespace(a='xxxxxxxx') %}{% for i in range(99) %}{% set ns.a = OP %}{% endfor %}{{ ns.a|length }}";
    let doubled = |op: &str| doubling.replace("OP", op);
    let sources = [
        "{% set ns = namespace() %}{% set ns.a = ns %}{{ ns }}".to_string(),
        "{% set ns = namespace() %}{% set ns.a = [1, {'b': ns}] %}{{ ns|tojson }}".into(),
        "{% set a = namespace() %}{% set b = namespace(x=a) %}{% set a.x = b %}{{ a|string }}".into(),
        "{% set ns = namespace(a=[]) %}{% for i in range(9999) %}{% set ns.a = [ns.a] %}{% endfor %}{{ ns.a }}".into(),
        "{% set ns = namespace(a=[1]) %}{% for i in range(64) %}{% set ns.a = [ns.a, ns.a] %}{% endfor %}{{ ns.a }}".into(),
        "{% for i in range(9999) %}{% for j in range(9999) %}{% endfor %}{% endfor %}".into(),
        "{% for i in range(9999) %}{% for j in range(9999) %}{{ i }}{% endfor %}{% endfor %}".into(),
        format!("{{% for i in range(9999) %}}{{% for j in range(99) %}}{}{{% endfor %}}{{% endfor %}}", "x".repeat(2000)),
        format!("{{% macro m() %}}{}{{% endmacro %}}{{% for i in range(99999) %}}{{{{ m() }}}}{{% endfor %}}", "x".repeat(9000)),
        doubled("ns.a + ns.a"),
        doubled("ns.a ~ ns.a"),
        doubled("ns.a * 2"),
        doubled("2 * ns.a"),
        doubled("[ns.a, ns.a]|join"),
        doubled("''.join([ns.a, ns.a])"),
        doubled("ns.a|replace('x', 'xx')"),
        doubled("ns.a.replace('x', 'xx')"),
        doubled("'%s%s'|format(ns.a, ns.a)"),
        doubled("'{0}{0}'.format(ns.a)"),
        "{% set ns = namespace(a=[1]) %}{% for i in range(99) %}{% set ns.a = ns.a + ns.a %}{% endfor %}".into(),
        "{% set ns = namespace(a='x') %}{% for i in range(99) %}{% set ns.a %}{{ ns.a }}{{ ns.a }}{% endset %}{% endfor %}".into(),
        "{% macro d(s) %}{{ s }}{{ s }}{% endmacro %}".to_string() + "{{ " + &"d(".repeat(40) + "'x'" + &")".repeat(40) + " }}",
        "{% macro f(n) %}{{ f(n + 1) }}{% endmacro %}{{ f(0) }}".into(),
        "{% macro f(n) %}{{ f(n) }}{{ f(n) }}{% endmacro %}{{ f(0) }}".into(),
        "{{ 'x'|indent(10**12) }}".into(),
        "{{ 'x\ny'|indent(width=1000000000) }}".into(),
        "{{ 'x' * 10**9 }}".into(),
        "{{ 10**9 * 'x' }}".into(),
        "{{ ([0] * 10**9)|list|length }}".into(),
        "{{ (1 * [0] * 10**9)|list|length }}".into(),
        "{{ '%999999999d'|format(1) }}".into(),
        "{{ '%*d'|format(999999999, 1) }}".into(),
        "{{ '{:>999999999}'.format('x') }}".into(),
        "{{ [1]|batch(10**12, 0)|list }}".into(),
        "{{ [1]|slice(10**12)|list }}".into(),
        "{{ range(10**12)|list }}".into(),
        "{{ [1]|tojson(indent=10**12) }}".into(),
        "{% for x in [1] recursive %}{{ loop([1]) }}{% endfor %}".into(),
        "{% include 'default' %}".into(),
        "{{ ".to_string() + &"[".repeat(5000) + &"]".repeat(5000) + " }}",
    ];
    for source in sources {
        let shown: String = source.chars().take(120).collect();
        let special = vec![("bos_token".to_string(), "<s>".to_string())];
        // Some are refused when they are compiled.
        let rendered = ChatTemplate::new(vec![("default".into(), source)], special)
            .and_then(|template| template.render(&[], RenderOptions::default()));
        match rendered {
            Ok(text) => panic!("{shown}: {} bytes", text.len()),
            Err(e) => assert!(e.to_string().starts_with("chat template: "), "{shown}: {e}"),
        }
    }
}

#[test]
#[ignore = "reads TRL's templates: runs in .ci/nightly"]
fn long_conversations_are_within_the_bounds() {
    let pair =
        [("user", "What? ".repeat(50)), ("assistant", "<think>\nWell.\n</think>\n\nThis. ".repeat(50))];
    let messages: Vec<Message> = (0..400)
        .flat_map(|_| pair.clone())
        .map(|(role, content)| message_of(&serde_json::json!({"role": role, "content": content})))
        .collect();
    for name in ["gptoss", "qwen3", "qwen3_5_think", "deepseekv3", "gemma4_v5", "nemotron_3_nano"] {
        let template = template(&source(name));
        let (text, turns) = template.render_with_turns(&messages, RenderOptions::default(), &[]).unwrap();
        assert_eq!(turns.len(), 400, "{name}: {}", text.len());
    }
}

#[test]
fn numbers_are_converted_as_in_jinja() {
    let source = "{{ ' 7\n'|int + 1 }} {{ ''|int }} {{ 'x'|int(default=3) }} {{ '2.9'|int }} {{ 'x'|float }}";
    assert_eq!(template(source).render(&[], RenderOptions::default()).unwrap(), "8 0 3 2 0.0");
}

/// Expected is what Jinja 3.1 on Python 3.11 prints.
#[test]
fn texts_are_changed_as_in_jinja() {
    for (expression, expected) in [
        ("ty|upper", "['INTEGER', NONE]"),
        ("ty|lower|title", "['integer', None]"),
        ("s|title", "It's <B> Q3-X"),
        ("'éA'|capitalize", "Éa"),
        ("s|escape", "it&#39;s &lt;b&gt; q3-x"),
        ("'a\"&'|e", "a&#34;&amp;"),
        ("2.5|round", "2.0"),
        ("3.5|round", "4.0"),
        ("2.675|round(2)", "2.67"),
        ("1234.5|round(-2)", "1200.0"),
        ("2.1|round(0,'ceil')", "3.0"),
        ("2.19|round(1, method='floor')", "2.1"),
        ("'0x1f'|int(0,16)", "31"),
        ("'zz'|int(7,16)", "7"),
        ("'101'|int(base=2)", "5"),
        ("s|replace('i','I',1)", "It's <b> q3-x"),
        ("'aaa'|replace('a','b')", "bbb"),
        ("'ab'|center(5)", "  ab "),
        ("'abc'|center(6)", " abc  "),
        ("'x'.center(4,'*')", "*x**"),
        ("'7'.zfill(3)", "007"),
        ("'-7'.zfill(4)", "-007"),
        ("'7'.ljust(3,'.')", "7.."),
        ("'7'.rjust(3)", "  7"),
        ("s.removeprefix('it')", "'s <b> q3-x"),
        ("s.removesuffix('x')", "it's <b> q3-"),
        ("s.removesuffix('y')", "it's <b> q3-x"),
        ("'a=b=c'.partition('=')|join(':')", "a:=:b=c"),
        ("'a=b=c'.rpartition('=')|join(':')", "a=b:=:c"),
        ("'abc'.partition('x')|join(':')", "abc::"),
        ("'a=b=c'.rsplit('=', 1)|join(':')", "a=b:c"),
        ("'a,b,c'.rsplit(sep=',', maxsplit=1)|join(':')", "a,b:c"),
        ("'  a b\\tc '.rsplit(none, 1)|join(':')", "  a b:c"),
        ("' a b '.rsplit()|join(':')", "a:b"),
        ("'a,,b'.rsplit(',', -1)|join(':')", "a::b"),
        ("' a '.rsplit(none, 0)|join(':')", " a"),
        ("''.rsplit(',')|length", "1"),
        ("''.rsplit()|length", "0"),
        ("'aBc'.swapcase()", "AbC"),
        ("'\\u001c a\\u001f\\u00a0'|trim", "a"),
        ("'\\u001c a\\u001f'.lstrip()|length", "2"),
        ("'\\u001ca '.rstrip()|length", "2"),
        ("'a\\u001fb  c'.split()|join(':')", "a:b:c"),
        ("'a\\rb\\r\\nc\\u0085d\\u2028e\\n'.splitlines()|join(':')", "a:b:c:d:e"),
        ("'a\\r\\n\\nb'.splitlines(true)|map('length')|join(':')", "3:1:1"),
        ("'a\\rb\\u000b\\nc'|indent(2)", "a\n  b\n\n  c"),
        ("'\\u001f \\n'.isspace() and not ''.isspace()", "True"),
        ("'ABC'.casefold()", "abc"),
        ("s.index('q')", "9"),
        ("s|wordcount", "5"),
    ] {
        let source = format!(
            "{{% set ty = ['integer', none] %}}{{% set s = \"it's <b> q3-x\" %}}{{{{ {expression} }}}}"
        );
        assert_eq!(
            template(&source).render(&[], RenderOptions::default()).unwrap(),
            expected,
            "{expression}"
        );
    }
    for wrong in [
        "'abc'.index('x')",
        "'7'.zfill()",
        "'a'.rsplit('')",
        "'a'.rsplit(1)",
        "2.5|round(0, 'up')",
        "'1'|int(0, 99)",
    ] {
        let source = format!("{{{{ {wrong} }}}}");
        assert!(template(&source).render(&[], RenderOptions::default()).is_err(), "{wrong}");
    }
}

#[test]
fn huge_steps_are_bounded_in_time() {
    let source = "{% set s = 'x' * 50000000 %}{% for i in range(99999) %}{% set y = s|reverse %}{% endfor %}";
    let error = template(source).render(&[], RenderOptions::default()).unwrap_err().to_string();
    assert!(error.contains("seconds"), "{error}");
}

#[test]
fn a_rows_arguments_may_name_a_template() {
    let sources = [("default", "plain"), ("rag", "from documents")];
    let sources = sources.map(|(name, text)| (name.to_string(), text.to_string())).to_vec();
    let template = ChatTemplate::new(sources, Vec::new()).unwrap();
    let render = |chosen: Value| {
        let kwargs = serde_json::json!({ "chat_template": chosen }).as_object().cloned();
        template.render(&[], RenderOptions { kwargs: kwargs.as_ref(), ..RenderOptions::default() })
    };
    assert_eq!(render("rag".into()).unwrap(), "from documents");
    assert_eq!(render(Value::Null).unwrap(), "plain");
    let error = render("{{ messages }}".into()).unwrap_err().to_string();
    assert!(error.contains("expected the name of a template: \"default\", \"rag\""), "{error}");
}
