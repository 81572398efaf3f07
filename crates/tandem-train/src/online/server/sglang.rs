//! SGLang's own interface, in which tokens go in and come back.
//!
//! Its replies do not name the adapter. It refuses a name that it never loaded, but without
//! `--enable-lora` some versions ignore names and answer with the base. So before each adapter it
//! must refuse one that does not exist. A name that it has unloaded is loaded again from the same
//! path on request; this is harmless, since a name is an adapter's content and the folder lives as
//! long as its round.

use serde::Deserialize;
use serde::de::IgnoredAny;
use serde_json::{Value, json};
use tandem_judge::http::Reply;

use super::super::generate::GenerationRequest;
use super::completion::CompletionRequest;
use super::protocol::{End, Protocol, ServerMessages, ServerReply};

pub(crate) struct Sglang;

const WORDS: ServerMessages = ServerMessages {
    name: "SGLang",
    models: "v1/models",
    answers: "generate",
    already: "already loaded",
    needs: "It must find the folder at the same path (online.server.adapters), be started with --enable-lora, have a --max-lora-rank of \
            the adapter's rank or more, and all modules of the adapter among its --lora-target-modules",
    switches: "give online.server.base_url of SGLang 0.5.5 or later, without /v1; is it vLLM, online.server.kind is \"vllm\"",
    // It reserves two positions and does not document them.
    whole: "Its --context-length must be data.max_length + 2 or more, and --allow-auto-truncate must not be given",
};

/// One completion of a reply; unused fields are left out.
#[derive(Deserialize)]
struct Output {
    output_ids: Option<Vec<u32>>,
    prompt_token_ids: Option<Vec<u32>>,
    meta_info: Meta,
}

#[derive(Deserialize)]
struct Meta {
    finish_reason: Finish,
    prompt_tokens: usize,
    /// Log-probability, token and text.
    output_token_logprobs: Option<Vec<(Option<f64>, u32, IgnoredAny)>>,
}

#[derive(Deserialize)]
struct Finish {
    #[serde(rename = "type")]
    kind: String,
    /// The token or the string that ended it.
    #[serde(default)]
    matched: Value,
    message: Option<String>,
}

/// Reply to loading an adapter.
#[derive(Deserialize)]
struct Update {
    success: bool,
    loaded_adapters: Option<serde_json::Map<String, Value>>,
}

impl Protocol for Sglang {
    fn words(&self) -> &'static ServerMessages {
        &WORDS
    }

    fn body(&self, form: &CompletionRequest<'_>, asked: &GenerationRequest, seed: u64) -> Value {
        let (num_answers, max_new_tokens) = (form.num_answers, form.options.max_new_tokens);
        let params = |answer: usize| {
            let seed = seed + answer as u64;
            form.with_sampling(json!({ "max_new_tokens": max_new_tokens, "sampling_seed": seed }))
        };
        // Not `n`, which gives all answers the same seed: with --enable-deterministic-inference
        // they would be one answer.
        json!({
            "input_ids": vec![form.prompt(asked); num_answers],
            "sampling_params": (0..num_answers).map(params).collect::<Vec<_>>(),
            "lora_path": form.name,
            "return_logprob": true,
            "return_prompt_token_ids": true,
        })
    }

    fn told(&self, form: &CompletionRequest<'_>, reply: &Value) -> Result<Vec<ServerReply>, String> {
        let outputs = Vec::<Output>::deserialize(reply)
            .map_err(|error| format!("its reply to /generate is not a reply of SGLang: {error}"))?;
        outputs.into_iter().map(|output| told(form, output)).collect()
    }

    fn impossible(&self, name: &str) -> Option<(String, Value)> {
        // Not the adapter's own name, which it loads again where a run that was killed had it
        // loaded. The form is that of real requests.
        let name = format!("{name}-that-is-never-loaded");
        let body =
            json!({ "input_ids": [[0]], "sampling_params": [{ "max_new_tokens": 1 }], "lora_path": name });
        Some((name, body))
    }

    fn loaded(&self, name: &str, reply: &Reply) -> Result<(), String> {
        let Ok(Update { success, loaded_adapters }) = serde_json::from_str(&reply.text) else {
            return Err("its reply to /load_lora_adapter is not a reply of SGLang".to_owned());
        };
        if !success || loaded_adapters.is_some_and(|adapters| !adapters.contains_key(name)) {
            return Err(format!("it reports the adapter {name:?} as not loaded"));
        }
        Ok(())
    }

    fn is_gone(&self, name: &str, reply: &Reply) -> bool {
        reply.status == 400 && reply.text.contains(name) && reply.text.contains("does not exist")
    }
}

fn told(form: &CompletionRequest<'_>, output: Output) -> Result<ServerReply, String> {
    let Output { output_ids, prompt_token_ids, meta_info } = output;
    let Meta { finish_reason: Finish { kind, matched, message }, prompt_tokens, output_token_logprobs } =
        meta_info;
    let Some(tokens) = output_ids else {
        return Err("its completions have no `output_ids`, and tokenising their text again may give other tokens than the \
                    sampled ones: SGLang 0.5.5 and later return them"
            .to_owned());
    };
    if output_token_logprobs.iter().any(|all| !all.iter().map(|(_, token, _)| token).eq(&tokens)) {
        return Err("a completion has log-probabilities of other tokens".to_owned());
    }
    let end = match (kind.as_str(), &matched) {
        ("length", _) => End::Length,
        ("stop", Value::Null) => End::Own,
        ("stop", Value::Number(_)) => End::token(&matched)?,
        // SGLang reports non-finite numbers this way.
        ("stop", Value::String(text)) if form.options.stop.contains(text) => End::Text,
        ("stop", other) => {
            return Err(format!("a completion ended by {other}, which is not in online.stop"));
        }
        (other, _) => {
            let message = message.map(|message| format!(" ({message})")).unwrap_or_default();
            return Err(format!("a completion ended by {other:?}{message}, not by \"stop\" or \"length\""));
        }
    };
    let log_probs =
        output_token_logprobs.map(|all| all.into_iter().map(|(log_prob, ..)| log_prob).collect::<Vec<_>>());
    Ok(ServerReply { tokens, end, log_probs, prompt: prompt_token_ids, prompt_length: Some(prompt_tokens) })
}
