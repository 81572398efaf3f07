//! vLLM's interface, which is OpenAI's with adapters that come and go.

use serde::Deserialize;
use serde_json::{Value, json};
use tandem_judge::http::Reply;

use super::super::generate::GenerationRequest;
use super::completion::CompletionRequest;
use super::protocol::{End, Protocol, ServerMessages, ServerReply};

pub(crate) struct Vllm;

const WORDS: ServerMessages = ServerMessages {
    name: "vLLM",
    models: "models",
    answers: "completions",
    already: "already been loaded",
    needs: "It must find the folder at the same path (online.server.adapters), and vLLM's --max-lora-rank must be the adapter's rank \
            or more",
    switches: "start vLLM with --enable-lora and VLLM_ALLOW_RUNTIME_LORA_UPDATING=True in its environment, and give \
               online.server.base_url with its /v1; is it SGLang, online.server.kind is \"sglang\"",
    whole: "Its --max-model-len must be data.max_length or more, and its --generation-config or --override-generation-config \
            must not have a smaller max_new_tokens",
};

/// A reply; unused fields are left out.
#[derive(Deserialize)]
struct Completion {
    model: String,
    choices: Vec<Choice>,
}

#[derive(Deserialize)]
struct Choice {
    index: usize,
    prompt_token_ids: Option<Vec<u32>>,
    token_ids: Option<Vec<u32>>,
    finish_reason: Option<String>,
    /// The string or the token that ended it; nothing where that is the model's own end token.
    #[serde(default)]
    stop_reason: Value,
    logprobs: Option<LogProbs>,
}

#[derive(Deserialize)]
struct LogProbs {
    token_logprobs: Vec<Option<f64>>,
}

impl Protocol for Vllm {
    fn words(&self) -> &'static ServerMessages {
        &WORDS
    }

    fn body(&self, form: &CompletionRequest<'_>, asked: &GenerationRequest, seed: u64) -> Value {
        let (num_answers, max_new_tokens) = (form.num_answers, form.options.max_new_tokens);
        form.with_sampling(json!({
            "model": form.name,
            "prompt": form.prompt(asked),
            "n": num_answers,
            "max_tokens": max_new_tokens,
            // vLLM adds the number of an answer.
            "seed": seed,
            "logprobs": 0,
            "return_token_ids": true,
        }))
    }

    fn told(&self, form: &CompletionRequest<'_>, reply: &Value) -> Result<Vec<ServerReply>, String> {
        let Completion { model, mut choices } = Completion::deserialize(reply)
            .map_err(|error| format!("its reply to /completions is not a reply of vLLM: {error}"))?;
        if model != form.name {
            return Err(format!(
                "it used the model {model:?}, expected {:?}: these are not the weights of the policy",
                form.name
            ));
        }
        choices.sort_by_key(|choice| choice.index);
        if choices.iter().enumerate().any(|(place, choice)| choice.index != place) {
            return Err(
                "the indices of its completions of a prompt (`index`) are not 0, 1, 2 and so on".to_owned()
            );
        }
        choices.into_iter().map(told).collect()
    }

    // Each reply says which model answered.
    fn impossible(&self, _: &str) -> Option<(String, Value)> {
        None
    }

    // The reply is text; the model list is checked afterwards.
    fn loaded(&self, _: &str, _: &Reply) -> Result<(), String> {
        Ok(())
    }

    fn is_gone(&self, name: &str, reply: &Reply) -> bool {
        reply.status == 404 && reply.text.contains(name)
    }
}

fn told(choice: Choice) -> Result<ServerReply, String> {
    let Choice { prompt_token_ids, token_ids, finish_reason, stop_reason, logprobs, .. } = choice;
    let Some(tokens) = token_ids else {
        return Err("its completions have no `token_ids`, and tokenising their text again may give other tokens than the \
                    sampled ones: vLLM 0.10.2 and later return them (`return_token_ids`)"
            .to_owned());
    };
    let end = match (finish_reason.as_deref(), &stop_reason) {
        (Some("length"), _) => End::Length,
        (Some("stop"), Value::Null) => End::Own,
        (Some("stop"), Value::Number(_)) => End::token(&stop_reason)?,
        (Some("stop"), _) => End::Text,
        (other, _) => {
            let other = other.unwrap_or("nothing");
            return Err(format!("a completion ended by {other}, not by \"stop\" or \"length\""));
        }
    };
    Ok(ServerReply {
        tokens,
        end,
        log_probs: logprobs.map(|log_probs| log_probs.token_logprobs),
        prompt: prompt_token_ids,
        prompt_length: None,
    })
}
