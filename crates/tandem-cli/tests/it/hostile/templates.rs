//! Chat templates that run for ever, write without end, or call themselves.

use super::GENERATE;
use crate::workshop::Workshop;

#[test]
fn templates_end() {
    let shop = Workshop::new();
    let chain =
        |before: &str, link: &str, after: &str| format!("{{{{ {before}{}{after} }}}}", link.repeat(50_000));
    let nested =
        |open: &str, close: &str, depth: usize| format!("{}{}", open.repeat(depth), close.repeat(depth));
    let grow = |start: &str, step: &str, times: usize| {
        format!(
            "{{% set ns = namespace(s={start}) %}}{{% for i in range({times}) %}}{{% set ns.s = {step} %}}{{% endfor %}}{{{{ ns.s }}}}"
        )
    };
    let cases = [
        "{% set ns = namespace() %}{% set ns.a = ns %}{{ ns }}".to_owned(),
        "{% set ns = namespace() %}{% set ns.a = [ns] %}{{ ns.a }}".into(),
        "{% set a = namespace() %}{% set b = namespace() %}{% set a.x = b %}{% set b.x = a %}{{ a }}".into(),
        "{% set ns = namespace() %}{% set ns.a = ns %}{{ ns|tojson }}".into(),
        "{% for i in range(99999) %}{% for j in range(99999) %}{% for k in range(99999) %}{% endfor %}{% endfor %}{% endfor %}".into(),
        "{% for i in range(9999) %}{% for j in range(9999) %}xxxxxxxxxx{% endfor %}{% endfor %}".into(),
        "{{ range(10**12)|list|length }}".into(),
        "{% for i in range(1000000000) %}x{% endfor %}".into(),
        grow("'aaaaaaaaaa'", "ns.s ~ ns.s", 60),
        grow("'aaaaaaaaaa'", "ns.s + ns.s", 60),
        grow("[1]", "ns.s + ns.s", 60),
        grow("'aaaaaaaaaaaaaaaa'", "ns.s.replace('a', 'aa')", 60),
        grow("'a'", "ns.s|replace('a', 'aa')", 60),
        grow("['x']", "[ns.s, ns.s]", 60),
        grow("{}", "{'a': ns.s, 'b': ns.s}", 90),
        grow("[]", "[ns.s]", 9000),
        "{{ 'a' * 10**12 }}".into(),
        "{{ [1] * 1000000000 }}".into(),
        "{{ 'a\nb'|indent(1000000000000) }}".into(),
        "{{ 'a'|center(1000000000000) }}".into(),
        "{{ 'a'.ljust(1000000000000) }}".into(),
        "{{ '1'.zfill(1000000000) }}".into(),
        "{{ '%1000000000d'|format(1) }}".into(),
        "{{ '{:>1000000000}'.format('a') }}".into(),
        "{{ (range(99999)|list)|join('a'*100000) }}".into(),
        "{{ messages|tojson(indent=1000000000) }}".into(),
        "{% macro f(x) %}{{ f(x) }}{% endmacro %}{{ f(1) }}".into(),
        "{% macro f(n) %}{{ f(n+1) }}{{ f(n+1) }}{% endmacro %}{{ f(1) }}".into(),
        "{% for x in [1] recursive %}{{ loop([x]) }}{% endfor %}".into(),
        "{% include 'default' %}".into(),
        "{% extends 'default' %}".into(),
        "{% set a='a'*9999999 %}{% for i in range(99999) %}{% if 'b' in a %}{% endif %}{% endfor %}".into(),
        "{{ 10**10**10 }}".into(),
        "{{ 1//0 }}".into(),
        "{{ 1%0 }}".into(),
        "{{ 'abc'[::0] }}".into(),
        "{{ raise_exception('x'*9999999) }}".into(),
        "{{ messages.__class__.__mro__ }}".into(),
        "{{".into(),
        "{% for".into(),
        "{{ % }}".into(),
        "a".repeat(1 << 20),
        "{{ 1 }}".repeat(20_000),
        format!("{{{{ {}1{} }}}}", "(".repeat(20_000), ")".repeat(20_000)),
        format!("{{{{ {}{} }}}}", "[".repeat(20_000), "]".repeat(20_000)),
        nested("{% if 1 %}", "{% endif %}", 2_400),
        nested("{% for i in [1] %}", "{% endfor %}", 2_400),
        nested("{% filter upper %}", "{% endfilter %}", 2_400),
        chain("1", "+1", ""),
        chain("1", "~1", ""),
        chain("1", "|string", ""),
        chain("1", " and 1", ""),
        chain("1", "==1", ""),
        chain("messages", ".a", ""),
        chain("messages", "[0]", ""),
        chain("", "not ", "1"),
        chain("", "-", "1"),
        chain("", "1 if 1 else ", "1"),
        // The tag does not end.
        chain("1", "+1", "").replace('}', " "),
    ];
    for template in cases {
        let case = &template.chars().take(120).collect::<String>();
        shop.refuses_with(case, "model/chat_template.jinja", template.as_bytes(), &GENERATE, &["emplate"]);
    }
    let config = shop.read("model/tokenizer_config.json");
    for template in
        [serde_json::json!({ "a": 1 }), serde_json::json!(["x"]), serde_json::json!("{{ 'a' * 10**12 }}")]
    {
        std::fs::remove_file(shop.path("model/chat_template.jinja")).ok();
        let mut changed: serde_json::Value = serde_json::from_str(&config).unwrap();
        changed["chat_template"] = template.clone();
        let case = template.to_string();
        shop.refuses_with(
            &case,
            "model/tokenizer_config.json",
            changed.to_string().as_bytes(),
            &GENERATE,
            &["emplate"],
        );
    }
}

/// Before any rank starts, by the row.
#[test]
fn a_template_that_fails_ends_a_run() {
    let shop = Workshop::new();
    for template in [
        "{% for i in range(1000000000) %}x{% endfor %}",
        "{% macro f(x) %}{{ f(x) }}{% endmacro %}{{ f(1) }}",
    ] {
        shop.write_rows("preferences.jsonl", 4, |i| {
            serde_json::json!({
                "prompt": [{ "role": "user", "content": format!("Count to {i}.") }],
                "chosen": [{ "role": "assistant", "content": "one" }],
                "rejected": [{ "role": "assistant", "content": "two" }],
            })
        });
        let words = ["preferences.jsonl:1", "chat template"];
        shop.refuses_with(
            template,
            "model/chat_template.jinja",
            template.as_bytes(),
            &["train", "dpo.toml"],
            &words,
        );
    }
}
