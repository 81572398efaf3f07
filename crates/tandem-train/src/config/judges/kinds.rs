//! Keys of each kind of judge. Defaults are those of `tandem-judge`.

use tandem_judge::{
    CommandConfig, Compare, EndpointConfig, ExactConfig, Expect, JsonConfig, LengthConfig, LengthUnit,
    MissingEosConfig, OwnConfig, RegexConfig, Rule,
};

use super::{JudgeKind, RewardSection};
use crate::config::error::Result;
use crate::config::form::{
    self, AT_LEAST_ONE, Form, POSITIVE, boolean, choice, custom, integer, number, path, path_or_name,
    seconds, text, texts_value,
};
use crate::config::hub::HubPart;
use crate::config::keys::{Keys, group, keys};
use crate::config::reader::Entry;

/// Most tokens, characters or items.
const MANY: u64 = 1 << 32;

/// Every kind: its name in the config, the function of its keys, and its value.
macro_rules! kinds {
    ($($name:literal: $visit:ident($config:ident) { $($kind:tt)+ })+) => {
        /// Names of all kinds.
        pub(crate) const KINDS: [&str; [$($name),+].len()] = [$($name),+];

        impl JudgeKind {
            /// Name in the config.
            pub const fn name(&self) -> &'static str {
                match self {
                    $(#[allow(unused_variables)] $($kind)+ => $name,)+
                }
            }

            pub(in crate::config) fn visit(kind: &str, now: Option<&Self>, keys: &mut Keys) -> Result<Self> {
                match kind {
                    $($name => {
                        let now = match now {
                            Some($($kind)+) => Some($config),
                            _ => None,
                        };
                        let $config = $visit(now, keys)?;
                        Ok($($kind)+)
                    })+
                    other => unreachable!("{other} is no kind of judge"),
                }
            }
        }
    };
}

kinds! {
    "length": length(config) { Self::Rule(Rule::Length(config)) }
    "regex": regex(config) { Self::Rule(Rule::Regex(config)) }
    "exact": exact(config) { Self::Rule(Rule::Exact(config)) }
    "json": json(config) { Self::Rule(Rule::Json(config)) }
    "missing_eos": missing_eos(config) { Self::Rule(Rule::MissingEos(config)) }
    "command": command(config) { Self::Command(config) }
    "endpoint": endpoint(config) { Self::Endpoint(config) }
    "reward": reward(config) { Self::Reward(config) }
    "own": own(config) { Self::Own(config) }
}

keys! {
    fn own() -> OwnConfig {
        /// Name of a function that the program has registered, with Tandem as its library.
        function = text().required("the name of a function that the program has registered"),
    }
}

keys! {
    fn length() -> LengthConfig {
        /// Unit of a length. Tokens do not count the stop token.
        unit = choice([("tokens", LengthUnit::Tokens), ("characters", LengthUnit::Characters)])
            .or(LengthUnit::default()),
        /// Least length that scores 1.
        min = integer(0..=MANY).or(0),
        /// Greatest length that scores 1.
        max = integer(0..=MANY).optional(),
        /// Instead: score of each token or character. A length below `min` counts as `min`, one
        /// above `max` as `max`.
        per_unit = number(..).optional(),
    }
}

keys! {
    fn regex() -> RegexConfig {
        /// A regular expression of the crate [`regex`](https://docs.rs/regex).
        pattern = text().required("a regular expression"),
        expect = group(expect),
    }
}

fn expect(now: Option<&Expect>, keys: &mut Keys) -> Result<Expect> {
    keys! { let keys, now;
        /// Condition on the match. `"match"`: somewhere. `"no_match"`: nowhere. `"group"`: the first group
        /// of the first match equals the row's `field`.
        expect = choice(["match", "no_match", "group"].map(|name| (name, name))).or("match"),
            match now {
                Expect::Match => "match",
                Expect::NoMatch => "no_match",
                Expect::Group { .. } => "group",
            };
        /// With `expect = "group"`: the row's field that the group should equal.
        field = text()
            .or(String::new())
            .required_if(expect == "group", "the row's field that the group should equal")
            .shown("none")
            .only(expect == "group", "only expect = \"group\" compares with a field; remove it"),
            if let Expect::Group { field } = now { field.clone() } else { String::new() };
    }
    Ok(match expect {
        "group" => Expect::Group { field },
        "no_match" => Expect::NoMatch,
        _ => Expect::Match,
    })
}

keys! {
    fn exact() -> ExactConfig {
        /// The row's field with the right answer.
        field = text().required("the row's field with the right answer"),
        /// Compared part: the text without surrounding blanks, or the last number in it.
        compare = choice([("text", Compare::Text), ("last_number", Compare::LastNumber)])
            .or(Compare::default()),
        /// Treat capital and small letters as equal.
        fold_case = boolean().or(false),
    }
}

keys! {
    fn json() -> JsonConfig {
        /// Keys that the completion's object should have.
        keys = texts("a list of keys").or(Vec::new()),
    }
}

keys! {
    fn missing_eos() -> MissingEosConfig {
        /// Penalty for a completion that did not end by itself.
        penalty = number(POSITIVE).or(MissingEosConfig::default().penalty),
    }
}

const COMMAND: &str = "a list: a program and its arguments, for example [\"python3\", \"judge.py\"]";

keys! {
    fn command() -> CommandConfig {
        /// Program and arguments. It runs in the current folder, to which relative paths refer.
        command = texts(COMMAND).required(COMMAND),
        /// Longest time for an item.
        timeout_s = seconds(POSITIVE).or(CommandConfig::default().timeout_s).formerly("seconds").free(),
        /// Longest time for the first item after a start, if that is longer.
        start_timeout_s =
            seconds(POSITIVE).or(CommandConfig::default().start_timeout_s).formerly("start_seconds").free(),
        /// Items given to the program before it answers.
        concurrency =
            integer(1..=MANY).or(CommandConfig::default().concurrency).formerly("in_flight").free(),
        /// Consecutive restarts.
        restarts = integer(0..=MANY).or(CommandConfig::default().restarts).free(),
        /// Pause before a restart; it doubles each time.
        first_pause_s = seconds(POSITIVE).or(CommandConfig::default().first_pause_s).free(),
        /// Longest pause.
        longest_pause_s = seconds(POSITIVE).or(CommandConfig::default().longest_pause_s).free(),
        /// Time to exit after stdin is closed; the program is then killed.
        grace_s = seconds(0.0..).or(CommandConfig::default().grace_s).free(),
    }
}

keys! {
    fn endpoint() -> EndpointConfig {
        /// Address up to the version, as `"http://localhost:8000/v1"`.
        base_url = text().required("an address up to the version, as \"http://localhost:8000/v1\""),
        /// Name of the model at the endpoint.
        model = text().required("the model's name at the endpoint"),
        /// Environment variable that holds the key, if the endpoint needs one.
        api_key_env = text().optional().free(),
        /// Text of a request, with `{prompt}`, `{a}` and `{b}`.
        prompt = text().or(EndpointConfig::default().prompt).shown("a built-in text"),
        /// Longest reply.
        max_tokens = integer(1..=u32::MAX.into()).unit("tokens").or(EndpointConfig::default().max_tokens),
        /// Longest time of a request.
        timeout_s = seconds(POSITIVE).or(EndpointConfig::default().timeout_s).free(),
        /// Repetitions of a failed request.
        retries = integer(0..=MANY).or(EndpointConfig::default().retries).free(),
        /// Pause before a repetition; it doubles each time.
        first_pause_s = seconds(POSITIVE).or(EndpointConfig::default().first_pause_s).free(),
        /// Longest pause.
        longest_pause_s = seconds(POSITIVE).or(EndpointConfig::default().longest_pause_s).free(),
        /// Requests in flight.
        concurrency = integer(1..=MANY).or(EndpointConfig::default().concurrency).free(),
        /// Folder that keeps replies.
        cache = path().optional().free(),
        /// Most requests sent.
        budget = integer(AT_LEAST_ONE).optional().free(),
    }
}

keys! {
    fn reward() -> RewardSection {
        /// Folder of a [reward model](reward.md), with its tokenizer, or its [name of the
        /// hub](hub.md).
        model = path_or_name(HubPart::Model).required("the folder of a reward model"),
        /// Most tokens of a prompt and its completion, at most the model's positions; a longer text
        /// has no score.
        max_length = integer(1..=MANY).unit("tokens").or(4096),
        /// Approximate tokens per forward pass, which determine its memory.
        micro_batch_tokens = integer(1..=MANY).unit("tokens").or(4096),
        /// Format of its matrices; `"auto"` is the compute type.
        format = form::format().or(None),
    }
}

/// A list of strings.
fn texts<'a>(expected: &'static str) -> Form<'a, Vec<String>> {
    let read = move |entry: Entry| {
        let wrong = entry.wrong(expected);
        if !entry.is_list() {
            return Err(wrong);
        }
        entry.items().into_iter().map(|item| (text().read)(item)).collect::<Result<_>>().map_err(|_| wrong)
    };
    custom("list", read, |texts: &Vec<String>| texts_value(texts))
}
