//! `[[judges]]`: every key, what it defaults to, and what is wrong with it.

use tandem_judge::{
    CommandConfig, Compare, EndpointConfig, ExactConfig, Expect, JsonConfig, LengthConfig, LengthUnit,
    MissingEosConfig, RegexConfig, Rule,
};
use tandem_kernels::Format;

use super::*;

/// The least that a judge of each kind needs.
const LEAST: [&str; 8] = [
    "kind = \"length\"\nmax = 9",
    "kind = \"regex\"\npattern = \"x\"",
    "kind = \"exact\"\nfield = \"answer\"",
    "kind = \"json\"",
    "kind = \"missing_eos\"",
    "kind = \"command\"\ncommand = [\"judge\"]",
    "kind = \"endpoint\"\nbase_url = \"http://localhost:1/v1\"\nmodel = \"m\"",
    "kind = \"reward\"\nmodel = \"r\"",
];

fn judges_of(text: &str) -> (TempDir, Result<Vec<JudgeSection>, ConfigError>) {
    let folder = TempDir::new().expect("a temporary folder");
    let path = folder.path().join("judges.toml");
    fs::write(&path, text).expect("written");
    let judges = load_judges(&path);
    (folder, judges)
}

fn judges(tables: &[&str]) -> (TempDir, Vec<JudgeSection>) {
    let text: String = tables.iter().map(|table| format!("[[judges]]\n{table}\n")).collect();
    let (folder, judges) = judges_of(&text);
    (folder, judges.unwrap_or_else(|e| panic!("{e}")))
}

fn refused(text: &str) -> String {
    let (folder, judges) = judges_of(text);
    let error = judges.expect_err("these judges must be refused").to_string();
    error.replace(&format!("{}/", folder.path().display()), "")
}

/// A judge of the kind, after a table that is right.
fn refused_second(table: &str) -> String {
    refused(&format!("[[judges]]\nkind = \"json\"\n\n[[judges]]\n{table}\n"))
}

#[test]
fn what_is_not_given_is_what_the_judges_default_to() {
    let (folder, judges) = judges(&LEAST);
    let base_url = "http://localhost:1/v1".to_owned();
    let kinds = [
        JudgeKind::Rule(Rule::Length(LengthConfig { max: Some(9), ..LengthConfig::default() })),
        JudgeKind::Rule(Rule::Regex(RegexConfig { pattern: "x".to_owned(), expect: Expect::Match })),
        JudgeKind::Rule(Rule::Exact(ExactConfig { field: "answer".to_owned(), ..ExactConfig::default() })),
        JudgeKind::Rule(Rule::Json(JsonConfig::default())),
        JudgeKind::Rule(Rule::MissingEos(MissingEosConfig::default())),
        JudgeKind::Command(CommandConfig { command: vec!["judge".to_owned()], ..CommandConfig::default() }),
        JudgeKind::Endpoint(EndpointConfig { base_url, model: "m".to_owned(), ..EndpointConfig::default() }),
        JudgeKind::Reward(RewardSection {
            model: folder.path().join("r"),
            max_length: 4096,
            micro_batch_tokens: 4096,
            format: None,
        }),
    ];
    let names = ["length", "regex", "exact", "json", "missing_eos", "command", "endpoint", "reward"];
    for ((judge, kind), name) in judges.into_iter().zip(kinds).zip(names) {
        assert_eq!(judge, JudgeSection { name: name.to_owned(), weight: 1.0, may_abstain: false, kind });
    }
}

/// Every key, each with a value that is not its default.
const WHOLE: [&str; 9] = [
    "kind = \"length\"\nname = \"short\"\nweight = -0.5\nunit = \"characters\"\nmin = 3\nmax = 30\nper_unit = -0.25",
    "kind = \"regex\"\npattern = 'a\\s(\"b\")'\nexpect = \"group\"\nfield = \"gold\"",
    "kind = \"regex\"\nname = \"no\"\npattern = \"sorry\"\nexpect = \"no_match\"",
    "kind = \"exact\"\nweight = 0\nfield = \"gold\"\ncompare = \"last_number\"\nfold_case = true",
    "kind = \"json\"\nkeys = [\"a\", \"b\"]",
    "kind = \"missing_eos\"\npenalty = 2",
    "kind = \"command\"\ncommand = [\"a\", \"b c\"]\ntimeout_s = 1\nstart_timeout_s = 2\nconcurrency = 3\nrestarts = 0\n\
     first_pause_s = 0.5\nlongest_pause_s = 4\ngrace_s = 0",
    "kind = \"endpoint\"\nbase_url = \"https://a/v1\"\nmodel = \"m\"\napi_key_env = \"KEY\"\nprompt = \"{prompt}\\n{a} \\\"{b}\"\n\
     max_tokens = 99\ntimeout_s = 1.5\nretries = 0\nfirst_pause_s = 1\nlongest_pause_s = 2\nconcurrency = 3\n\
     cache = \"../cache\"\nbudget = 77",
    "kind = \"reward\"\nmodel = \"r\"\nmax_length = 512\nmicro_batch_tokens = 1000\nformat = \"int8\"",
];

#[test]
fn every_key_arrives_and_is_written_so_that_it_reads_back() {
    let (folder, judges) = judges(&WHOLE);
    assert_eq!((judges[0].name.as_str(), judges[0].weight, judges[3].weight), ("short", -0.5, 0.0));
    let JudgeKind::Rule(Rule::Length(length)) = &judges[0].kind else { panic!("{:?}", judges[0]) };
    let expected =
        LengthConfig { unit: LengthUnit::Characters, min: 3, max: Some(30), per_unit: Some(-0.25) };
    assert_eq!(*length, expected);
    let JudgeKind::Rule(Rule::Exact(exact)) = &judges[3].kind else { panic!("{:?}", judges[3]) };
    assert!(exact.compare == Compare::LastNumber && exact.fold_case);
    let JudgeKind::Endpoint(endpoint) = &judges[7].kind else { panic!("{:?}", judges[7]) };
    assert_eq!(endpoint.cache, folder.path().parent().map(|parent| parent.join("cache")));
    assert_eq!((endpoint.max_tokens, endpoint.budget, endpoint.retries), (99, Some(77), 0));
    let JudgeKind::Reward(reward) = &judges[8].kind else { panic!("{:?}", judges[8]) };
    assert_eq!((reward.max_length, reward.format), (512, Some(Format::Int8)));

    for judges in [judges, self::judges(&LEAST).1] {
        let mut config = load(online::ONLINE);
        config.judges = judges.clone();
        let text = config.to_toml();
        let (_, tables) = text.split_at(text.find("[[judges]]").expect("written"));
        let (_folder, again) = judges_of(tables);
        assert_eq!(again.unwrap_or_else(|e| panic!("{e}")), judges, "{tables}");
    }
}

#[test]
fn mistakes_are_refused_with_line_key_and_remedy() {
    for (table, expected) in [
        ("kind = \"lenght\"", "judges.toml:5: `judges[1].kind`: expected one of \"length\", "),
        ("kind = \"lenght\"", "(did you mean \"length\"?)"),
        (
            "name = \"x\"",
            "judges.toml:4: `judges[1].kind` is missing: give the judge's kind: one of \"length\", ",
        ),
        (
            "kind = \"exact\"\nfeild = \"x\"",
            "judges.toml:6: unknown key `judges[1].feild`; did you mean `judges[1].field`?",
        ),
        (
            "kind = \"missing_eos\"\nmax = 3",
            "judges.toml:6: unknown key `judges[1].max`; known here: kind, name, weight, may_abstain, penalty",
        ),
        (
            "kind = \"length\"\nmxa = 3",
            "judges.toml:6: unknown key `judges[1].mxa`; did you mean `judges[1].max`?",
        ),
        ("kind = \"length\"\nmin = -1", "judges.toml:6: `judges[1].min`: expected an integer from 0 to "),
        (
            "kind = \"length\"\nmin = 4\nmax = 3",
            "judges.toml:7: `judges[1].max`: it is 3, less than `min` = 4",
        ),
        ("kind = \"length\"", "judges.toml:4: `judges[1].max`: it is missing: set it, `min` or `per_unit`"),
        ("kind = \"length\"\nper_unit = nan", "expected a finite number, found the number NaN"),
        ("kind = \"missing_eos\"\nweight = inf", "`judges[1].weight`: expected a finite number"),
        ("kind = \"missing_eos\"\npenalty = \"1\"", "expected a positive number, found the string \"1\""),
        (
            "kind = \"regex\"\npattern = \"a(\"",
            "judges.toml:6: `judges[1].pattern`: it is no regular expression that is understood",
        ),
        (
            "kind = \"regex\"\npattern = \"a\"\nexpect = \"group\"\nfield = \"f\"",
            "it `a` has no group to compare",
        ),
        ("kind = \"regex\"\npattern = \"(a)\"\nexpect = \"group\"", "`judges[1].field` is missing"),
        (
            "kind = \"regex\"\npattern = \"a\"\nfield = \"f\"",
            "only expect = \"group\" compares with a field; remove it",
        ),
        (
            "kind = \"command\"\ncommand = \"python3 judge.py\"",
            "`judges[1].command`: expected a list: a program and its arguments",
        ),
        (
            "kind = \"command\"\ncommand = []",
            "`judges[1].command`: it is empty; name a program and its arguments",
        ),
        (
            "kind = \"command\"\ncommand = [\"a\"]\ntimeout_s = 0",
            "expected a positive number of seconds, found the integer 0",
        ),
        (
            "kind = \"command\"\ncommand = [\"a\"]\ntimeout_s = 1e30",
            "judges.toml:7: `judges[1].timeout_s`: it is 1",
        ),
        (
            "kind = \"endpoint\"\nbase_url = \"http://a/v1\"",
            "`judges[1].model` is missing: give the model's name at the endpoint",
        ),
        (
            "kind = \"endpoint\"\nbase_url = \"localhost\"\nmodel = \"m\"",
            "`judges[1].base_url`: it is no address",
        ),
        (
            "kind = \"endpoint\"\nbase_url = \"http://a/v1\"\nmodel = \"m\"\nprompt = \"{a} {b}\"",
            "it has no `{prompt}`",
        ),
        (
            "kind = \"reward\"\nmodel = \"r\"\nformat = \"fp4\"",
            "expected one of \"auto\", \"f32\", \"bf16\", \"int8\", \"fp8\", \"nf4\"",
        ),
        (
            "kind = \"json\"",
            "judges.toml:5: `judges[1].kind`: another judge is named \"json\" too; set a different `name` for each",
        ),
        (
            "kind = \"missing_eos\"\nname = \"json\"",
            "judges.toml:6: `judges[1].name`: another judge is named \"json\" too",
        ),
        ("kind = \"missing_eos\"\nname = \"\"", "`judges[1].name`: expected a name, found the string \"\""),
    ] {
        let text = refused_second(table);
        assert!(text.contains(expected), "{table}:\n{text}");
    }
}

#[test]
fn a_panel_has_someone_who_counts() {
    let text = refused(
        "[[judges]]\nkind = \"json\"\nweight = 0\n[[judges]]\nkind = \"missing_eos\"\nweight = 0.0\n",
    );
    assert!(
        text.contains("`judges`: no judge's score counts; set a `weight` other than 0 for one"),
        "{text}"
    );
    assert_eq!(refused(""), "judges.toml: `judges` is missing: give a [[judges]] table for each judge");
    assert!(refused("judges = []").contains("expected one [[judges]] table or more, found a list"));
    assert!(
        refused("[judges]\nkind = \"json\"").contains("expected one [[judges]] table or more, found a table")
    );
    let text = refused("[[judges]]\nkind = \"json\"\n[[judge]]\nkind = \"json\"\n");
    assert_eq!(text, "judges.toml:3: unknown key `judge`; did you mean `judges`?");
}

#[test]
fn a_method_that_generates_nothing_has_no_judges() {
    let text = refusal(&format!("{EXAMPLE}[[judges]]\nkind = \"json\"\n"), &[]);
    assert!(
        text.ends_with(
            "`judges`: method = \"dpo\" generates no completions to judge; remove the [[judges]] tables"
        ),
        "{text}"
    );
    assert!(load(EXAMPLE).judges.is_empty());
}

#[test]
fn what_a_judge_may_spend_is_free_to_change_and_what_it_judges_is_not() {
    let change = |name: &str, from: &str, to: &str| {
        let of = |judge: &str| {
            let mut config = load(online::ONLINE);
            config.judges = judges(&[judge]).1;
            config
        };
        let [mut saved, mut now] = [of(from), of(to)];
        saved.output.clone_from(&now.output);
        saved.model.clone_from(&now.model);
        now.data = saved.data.clone();
        let changes = now.changes_since(&saved);
        assert_eq!(changes.len(), 1, "{changes:?}");
        assert_eq!(changes[0].key, format!("judges[0].{name}"));
        changes[0].alters_run
    };
    assert!(!change("concurrency", LEAST[5], &format!("{}\nconcurrency = 2", LEAST[5])));
    assert!(change("weight", LEAST[5], &format!("{}\nweight = 2", LEAST[5])));
    assert!(change("max", LEAST[0], "kind = \"length\"\nmax = 8"));
}

#[test]
fn the_examples_of_the_documentation_are_right() {
    tandem_judge::register("vowels", |_, _| Some(0.0));
    let page = include_str!("../../../../../docs/judges.md");
    let examples = page.split("```toml\n").skip(1).map(|rest| rest.split("```").next().expect("an end"));
    let mut kinds = Vec::new();
    for example in examples {
        let (_folder, judges) = judges_of(example);
        kinds.extend(judges.unwrap_or_else(|e| panic!("{e}:\n{example}")).iter().map(|j| j.kind.name()));
    }
    for least in LEAST {
        let kind = least.split('"').nth(1).expect("a kind");
        assert!(kinds.contains(&kind), "no example of {kind}");
    }
}
