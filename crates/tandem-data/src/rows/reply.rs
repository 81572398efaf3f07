//! Tokens of messages that follow a turn which a model sampled.
//!
//! The sampled tokens stay as they are; the chat template says what lies between them and the
//! model's next turn.

use crate::error::DataError;
use crate::rows::prompts::PromptRow;
use crate::source::record::{Message, Text};
use crate::text::chat_template::RenderOptions;
use crate::text::tokenizer::Tokenizer;

/// Noncharacters, one of which marks the end of the model's turn in a rendered conversation.
const MARKS: std::ops::RangeInclusive<char> = '\u{fdd8}'..='\u{fdef}';

impl PromptRow {
    /// Returns the tokens between the model's turn and its next one: the end of its turn, the
    /// messages of `reply`, and the header of the next turn. `conversation` are the messages after
    /// the prompt, the last of which is the model's; `sampled` are that turn's tokens. An end token
    /// among them is not repeated. To a text prompt, the contents of `reply` are appended as they
    /// are.
    ///
    /// # Errors
    /// If the chat template refuses the messages, or changes earlier turns when others follow.
    pub fn reply_tokens(
        &self,
        tokenizer: &Tokenizer,
        conversation: &[Message],
        sampled: &[u32],
        reply: &[Message],
    ) -> Result<Vec<u32>, DataError> {
        let prompt = match self.prompt() {
            Text::Plain(_) => {
                let text: String = reply.iter().map(content).collect();
                return tokenizer.encode_rendered(&text);
            }
            Text::Chat(messages) => messages,
        };
        let between = self.between(tokenizer, prompt, conversation, reply)?;
        let Some(&end) = sampled.last().filter(|token| tokenizer.eos_ids().contains(token)) else {
            return tokenizer.encode_rendered(&between);
        };
        let text = tokenizer.decode(&[end], false)?;
        let rest = between.trim_start().strip_prefix(&text).filter(|_| !text.is_empty());
        let Some(rest) = rest else { return tokenizer.encode_rendered(&between) };
        // Encoded with the end token before it, as in a whole conversation.
        match tokenizer.encode_rendered(&format!("{text}{rest}"))?.split_first() {
            Some((first, rest)) if *first == end => Ok(rest.to_vec()),
            _ => tokenizer.encode_rendered(rest),
        }
    }

    /// Returns what the template writes after the content of the conversation's last turn.
    fn between(
        &self,
        tokenizer: &Tokenizer,
        prompt: &[Message],
        conversation: &[Message],
        reply: &[Message],
    ) -> Result<String, DataError> {
        let refused = |what: &str| DataError::Template {
            reason: format!(
                "{what}; an environment needs a template that keeps the turns of a conversation as they were: set \
                 data.chat_template to one that does (the model's is in {})",
                tokenizer.folder().display()
            ),
        };
        let mut messages = [prompt, conversation].concat();
        let all = messages.iter().chain(reply).flat_map(|message| message.values());
        let texts: Vec<&str> = all.filter_map(serde_json::Value::as_str).collect();
        let mark = MARKS.clone().find(|mark| !texts.iter().any(|text| text.contains(*mark)));
        let mark = mark.ok_or_else(|| refused("the messages hold every noncharacter of Unicode"))?;
        let turn = messages.last_mut().expect("a turn of the model");
        let own = content(turn).to_owned();
        turn.insert("content".to_owned(), format!("{own}{mark}").into());
        let options = |add_generation_prompt| RenderOptions {
            tools: self.record.tools.as_ref(),
            kwargs: Some(&self.record.template_kwargs),
            add_generation_prompt,
        };
        let template = tokenizer.chat_template()?;
        let before = template.render(&messages, options(false))?;
        messages.extend_from_slice(reply);
        let after = template.render(&messages, options(true))?;
        let (Some((kept, _)), Some((again, between))) = (before.split_once(mark), after.split_once(mark))
        else {
            return Err(refused("it does not write the assistant's last turn as it is"));
        };
        if kept != again {
            return Err(refused("it changes earlier turns when messages follow"));
        }
        if !kept.ends_with(own.trim_start()) {
            return Err(refused("it changes the text of the assistant's last turn"));
        }
        Ok(between.to_owned())
    }
}

fn content(message: &Message) -> &str {
    message.get("content").and_then(serde_json::Value::as_str).unwrap_or_default()
}
