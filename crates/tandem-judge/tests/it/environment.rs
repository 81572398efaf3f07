//! Environments that work, and that fail in every way.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use serde_json::{Map, Value, json};
use tandem_judge::{
    CommandConfig, Conversation, Environment, EnvironmentReply, JudgeError, Message, Prompt, Result,
};

use crate::support::GO;

/// Longer than anything takes on a busy machine.
const EVER: f64 = 120.0;

/// An environment that runs `each` for each item: `$line` is the item, `$id` its number.
fn environment(each: &str, more: CommandConfig) -> Environment {
    let script = format!("while read -r line; do id=${{line#*\\\"id\\\":}}; id=${{id%%,*}}; {each}; done");
    let config = CommandConfig {
        command: ["sh", "-c", &script].map(str::to_owned).to_vec(),
        first_pause_s: 0.001,
        longest_pause_s: 0.01,
        ..more
    };
    Environment::new(config, Arc::new(|_: &str| {})).unwrap()
}

fn patient() -> CommandConfig {
    CommandConfig { timeout_s: EVER, start_timeout_s: EVER, ..CommandConfig::default() }
}

fn message(role: &str, content: &str) -> Message {
    json!({ "role": role, "content": content }).as_object().unwrap().clone()
}

fn step(environment: &mut Environment, is_last: &[bool], stop: &AtomicBool) -> Result<Vec<EnvironmentReply>> {
    let (messages, row) = ([message("assistant", "five")], Map::new());
    let conversation = |&is_last: &bool| Conversation {
        prompt: Prompt::Text("Guess."),
        messages: &messages,
        turn: 1,
        is_last,
        row: &row,
    };
    environment.step(&is_last.iter().map(conversation).collect::<Vec<_>>(), stop)
}

/// Replies to one conversation that goes on.
fn reply(each: &str) -> EnvironmentReply {
    step(&mut environment(each, patient()), &[false], &GO).unwrap().remove(0)
}

#[test]
fn conversations_are_what_the_protocol_says() {
    let mut environment =
        environment(r#"printf '%s\n' "{\"id\":$id,\"reward\":0.5,\"reason\":$line}""#, patient());
    let row = json!({ "number": 4 });
    let prompt = [json!({ "role": "user", "content": "Guess." })];
    let messages = [message("assistant", "fi\n\"ve"), message("tool", "less"), message("assistant", "4")];
    let conversation = Conversation {
        prompt: Prompt::Messages(&prompt),
        messages: &messages,
        turn: 2,
        is_last: true,
        row: row.as_object().unwrap(),
    };
    let text = Conversation { prompt: Prompt::Text("Guess."), is_last: false, ..conversation.clone() };
    let replies = environment.step(&[conversation, text], &GO).unwrap();
    let expected = |id: u64, prompt: Value, list: Value, is_last: bool| EnvironmentReply::End {
        reward: 0.5,
        reason: json!({
            "id": id,
            "prompt": prompt,
            "messages": list,
            "conversation": messages,
            "turn": 2,
            "is_last": is_last,
            "row": row,
        }),
    };
    let first = expected(0, Value::Null, json!(prompt), true);
    assert_eq!(replies, [first, expected(1, json!("Guess."), Value::Null, false)]);
}

#[test]
fn messages_continue_a_conversation_that_may_go_on() {
    let each =
        r#"echo "{\"id\":$id,\"messages\":[{\"role\":\"tool\",\"content\":\"less\",\"name\":\"f\"}]}""#;
    let replies = step(&mut environment(each, patient()), &[false, true], &GO).unwrap();
    let expected = json!({ "role": "tool", "content": "less", "name": "f" });
    assert_eq!(replies[0], EnvironmentReply::Messages(vec![expected.as_object().unwrap().clone()]));
    let EnvironmentReply::Dropped(why) = &replies[1] else { panic!("{replies:?}") };
    assert!(why.as_str().unwrap().contains("had to end"), "{why}");
}

#[test]
fn what_is_no_reply_drops_the_conversation() {
    for (fields, expected) in [
        (r#"\"reward\":1e999"#, "not JSON"),
        (r#"\"reward\":\"1\""#, "no number"),
        (r#"\"reward\":null"#, "no reward and no reason"),
        (r#"\"reward\":null,\"reason\":\"lost\""#, "lost"),
        (r#"\"score\":1"#, "neither"),
        (r#"\"messages\":[]"#, "no list with a message"),
        (r#"\"messages\":\"more\""#, "no list with a message"),
        (r#"\"messages\":[{\"role\":\"user\"}]"#, "`role` and `content`"),
        (r#"\"messages\":[{\"role\":\"assistant\",\"content\":\"x\"}]"#, "the policy's"),
        (r#"\"messages\":[{\"role\":\"user\",\"content\":\"x\"}],\"reward\":1"#, "both"),
    ] {
        let found = reply(&format!(r#"echo "{{\"id\":$id,{fields}}}""#));
        let EnvironmentReply::Dropped(why) = &found else { panic!("{fields}: {found:?}") };
        assert!(why.as_str().unwrap().contains(expected), "{fields}: {why}");
    }
    let EnvironmentReply::Dropped(why) = reply("echo noise") else { panic!("noise is no reply") };
    assert!(why.as_str().unwrap().contains("answers no item: noise"), "{why}");
}

/// Only the conversation on which it hangs or ends is dropped.
#[test]
fn one_that_hangs_or_dies_costs_one_conversation() {
    let reward = r#"echo "{\"id\":$id,\"reward\":$id}""#;
    for (fails, timeout_s) in [("sleep 1000", 1.0), ("exit 1", EVER)] {
        let config = CommandConfig { timeout_s, start_timeout_s: timeout_s, ..patient() };
        let each = format!("if [ $id = 1 ]; then {fails}; else {reward}; fi");
        let replies = step(&mut environment(&each, config), &[false; 4], &GO).unwrap();
        for (id, reply) in replies.iter().enumerate() {
            match reply {
                EnvironmentReply::End { reward, .. } => assert!(id != 1 && *reward == id as f64),
                EnvironmentReply::Dropped(_) => assert_eq!(id, 1),
                EnvironmentReply::Messages(_) => panic!("{reply:?}"),
            }
        }
    }
}

#[test]
fn one_that_always_ends_is_an_error_with_its_last_words() {
    let mut environment =
        environment("echo no board >&2; exit 7", CommandConfig { restarts: 2, ..patient() });
    let error = step(&mut environment, &[false; 3], &GO).unwrap_err().to_string();
    assert!(error.contains("ended 3 times in a row") && error.contains("no board"), "{error}");
}

#[test]
fn a_stop_ends_the_wait() {
    let stop = AtomicBool::new(true);
    let mut environment = environment("sleep 1000", patient());
    assert!(matches!(step(&mut environment, &[false], &stop), Err(JudgeError::Stopped)));
}
