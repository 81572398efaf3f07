//! Conversations of the policy with an environment: answers of several turns.
//!
//! The first turn is generated as an answer is. Then rank 0 asks the environment about all
//! conversations under way, all ranks learn the tokens that follow, and each generates its share of
//! the next turns, until all conversations have ended. A turn's sampling depends on the run's seed,
//! step, row, number of the answer and turn, never on the rank.

use std::collections::HashMap;
use std::sync::atomic::AtomicBool;

use serde_json::Value;
use tandem_comm::{Phase, ProcessGroup};
use tandem_data::prompts::PromptRow;
use tandem_judge::{Conversation, Environment, EnvironmentReply, JudgeError, Prompt};
use tandem_model::decode::Sources;

use super::answers::{Answer, CompletedPrompt, JudgeScore, Message, Turn};
use super::generate::{Asked, Generation, GenerationContext, GenerationRequest, LockstepGroup, TurnRequest};
use super::keepalive::KeepAlive;
use super::render::SampleRenderer;
use crate::Result;
use crate::config::EnvironmentConfig;
use crate::metrics::Split;
use crate::parallel::DeviceMesh;

/// Name of the environment's reward in metrics and samples.
pub(crate) const ENVIRONMENT: &str = "environment";

/// A conversation.
struct Talk {
    of: GenerationRequest,
    /// Its number among the answers to the prompt.
    number: usize,
    answer: Answer,
    is_ended: bool,
}

/// Continuation of a conversation after a turn of the policy.
enum Next {
    /// Messages, and the tokens up to the policy's next turn.
    Messages(Vec<Message>, Vec<u32>),
    /// The end, with or without a reward.
    End(JudgeScore),
}

impl Generation {
    /// Generates conversations in place of answers: as [`Generation::answer`], with their rewards. Only
    /// rank 0 has the environment.
    #[expect(clippy::too_many_arguments, reason = "those of generation and the environment")]
    pub fn converse(
        &self,
        environment: Option<&mut Environment>,
        on: &GenerationContext<'_>,
        sources: &mut dyn Sources,
        mut together: Option<&mut LockstepGroup>,
        mesh: &mut DeviceMesh,
        stop: &AtomicBool,
        asked: &Asked,
    ) -> Result<Option<Vec<Vec<Answer>>>> {
        let limits = self.options.environment.as_ref().expect("a run with an environment");
        let mut environment = environment;
        let Some(first) = self.answer(on, sources, together.as_deref_mut(), mesh, stop, asked)? else {
            return Ok(None);
        };
        let of = asked.requests.iter().zip(first);
        let mut talks: Vec<Talk> = of.flat_map(|(of, answers)| begin(*of, answers)).collect();
        let (num_talks, mut is_rewarded) = (talks.len(), false);
        for turn in 1.. {
            let mut open: Vec<&mut Talk> = talks.iter_mut().filter(|talk| !talk.is_ended).collect();
            on.progress.begin_phase(Phase::Judge);
            let asking = Asking {
                limits,
                max_length: self.max_length,
                shown: &SampleRenderer::new(on.inputs, Split::Train, &self.options.stop),
                turn,
            };
            let mut company = KeepAlive::new(mesh.world(), stop);
            let mut next = None;
            if let Some(environment) = environment.as_deref_mut() {
                let open: Vec<&Talk> = open.iter().map(|talk| &**talk).collect();
                next = company.working(|stop| asking.ask(environment, &open, stop))??;
                if let Some(next) = &next {
                    is_rewarded |=
                        next.iter().any(|next| matches!(next, Next::End(JudgeScore { score: Some(_), .. })));
                    if !is_rewarded {
                        refuse_unrewarded(next, num_talks)?;
                    }
                }
            }
            if !company.end()? {
                return Ok(None);
            }
            apply(&mut open, next, mesh.world())?;
            on.progress.begin_phase(Phase::Generate);
            open.retain(|talk| !talk.is_ended);
            if open.is_empty() {
                break;
            }
            let requests: Vec<TurnRequest> = open
                .iter()
                .map(|talk| TurnRequest {
                    of: talk.of,
                    answer: talk.number,
                    turn,
                    tokens: &talk.answer.tokens,
                })
                .collect();
            let turns = self.next_turns(on, sources, together.as_deref_mut(), mesh, stop, &requests)?;
            let Some(turns) = turns else { return Ok(None) };
            open.iter_mut().zip(turns).for_each(|(talk, turn)| talk.add(turn));
        }
        let mut answers = talks.into_iter().map(|talk| talk.answer);
        let of_prompt = |_| answers.by_ref().take(asked.num_answers).collect();
        Ok(Some(asked.requests.iter().map(of_prompt).collect()))
    }
}

/// Begins a conversation with each first turn.
fn begin(of: GenerationRequest, answers: Vec<Answer>) -> impl Iterator<Item = Talk> {
    answers.into_iter().enumerate().map(move |(number, first)| {
        let mut talk = Talk { of, number, answer: Answer::default(), is_ended: false };
        talk.add(first);
        talk
    })
}

impl Talk {
    /// Adds a turn of the policy.
    fn add(&mut self, turn: Answer) {
        let begin = self.answer.tokens.len() as u32;
        let tokens = [begin, begin + turn.tokens.len() as u32];
        self.answer.turns.push(Turn { tokens, messages: Vec::new() });
        self.answer.tokens.extend(turn.tokens);
        self.answer.log_probs.extend(turn.log_probs);
        self.answer.log_prob += turn.log_prob;
        self.answer.is_ended = turn.is_ended;
    }

    /// Returns the tokens of the policy's last turn.
    fn last_turn(&self) -> &[u32] {
        self.answer.turn(self.answer.turns.last().expect("a conversation has a turn"))
    }
}

/// Gives each conversation what follows, which rank 0 knows. The others learn tokens and rewards.
fn apply(open: &mut [&mut Talk], next: Option<Vec<Next>>, group: &mut ProcessGroup) -> Result<()> {
    // A length of -1 is the end.
    let (mut lengths, mut rewards) = (vec![-1i64; open.len()], vec![f64::NAN; open.len()]);
    let mut tokens: Vec<u8> = Vec::new();
    for (place, next) in next.into_iter().flatten().enumerate() {
        match next {
            Next::Messages(messages, new) => {
                lengths[place] = new.len() as i64;
                tokens.extend(new.iter().flat_map(|token| token.to_le_bytes()));
                open[place].answer.turns.last_mut().expect("a turn").messages = messages;
            }
            Next::End(score) => {
                rewards[place] = score.score.unwrap_or(f64::NAN);
                open[place].answer.opinions = vec![score];
            }
        }
    }
    if group.size() > 1 {
        group.broadcast(&mut lengths, 0)?;
        group.broadcast(&mut rewards, 0)?;
        tokens.resize(4 * lengths.iter().map(|length| (*length).max(0) as usize).sum::<usize>(), 0);
        if !tokens.is_empty() {
            group.broadcast(&mut tokens, 0)?;
        }
    }
    let mut tokens = tokens.as_chunks::<4>().0.iter().map(|&token| u32::from_le_bytes(token));
    for ((talk, length), reward) in open.iter_mut().zip(lengths).zip(rewards) {
        match usize::try_from(length) {
            Ok(length) => talk.answer.tokens.extend(tokens.by_ref().take(length)),
            Err(_) => {
                talk.is_ended = true;
                talk.answer.score = Some(reward).filter(|reward| !reward.is_nan());
            }
        }
    }
    Ok(())
}

/// Refuses a round whose last conversations end here, when none of its conversations had a reward.
fn refuse_unrewarded(next: &[Next], conversations: usize) -> Result<(), JudgeError> {
    let mut reason = None;
    for next in next {
        match next {
            Next::Messages(..) => return Ok(()),
            Next::End(score) => {
                reason = Some(score.said.as_str().map_or_else(|| score.said.to_string(), str::to_owned));
            }
        }
    }
    reason.map_or(Ok(()), |reason| Err(JudgeError::NoReward { conversations, reason }))
}

/// A round of questions to the environment.
struct Asking<'a> {
    limits: &'a EnvironmentConfig,
    max_length: usize,
    shown: &'a SampleRenderer<'a>,
    /// Turns of the policy so far.
    turn: usize,
}

/// A conversation as the environment gets it.
struct Shown {
    row: PromptRow,
    prompt: Value,
    /// The row's other fields.
    fields: serde_json::Map<String, Value>,
    messages: Vec<Message>,
}

impl Asking<'_> {
    /// Asks about conversations. Those whose messages would exceed the length are asked about again, as
    /// ones that end. `None` if it was stopped.
    fn ask(
        &self,
        environment: &mut Environment,
        open: &[&Talk],
        stop: &AtomicBool,
    ) -> Result<Option<Vec<Next>>> {
        let shown = open.iter().map(|talk| self.show(talk)).collect::<Result<Vec<Shown>>>()?;
        let is_last = |place: usize| self.turn == self.limits.max_turns || self.left(open[place]) < 1;
        let all: Vec<(usize, bool)> = (0..open.len()).map(|place| (place, is_last(place))).collect();
        let Some(replies) = self.step(environment, &shown, &all, stop)? else { return Ok(None) };
        let (mut next, mut too_long) = (HashMap::new(), Vec::new());
        for ((place, _), reply) in all.into_iter().zip(replies) {
            let (talk, shown) = (open[place], &shown[place]);
            let reply = match reply {
                EnvironmentReply::Messages(messages) => {
                    let turn = talk.last_turn();
                    let tokens =
                        shown.row.reply_tokens(self.shown.tokenizer, &shown.messages, turn, &messages)?;
                    if tokens.len() + 1 > self.left(talk) {
                        too_long.push((place, true));
                        continue;
                    }
                    Next::Messages(messages, tokens)
                }
                reply => end(reply),
            };
            next.insert(place, reply);
        }
        let Some(replies) = self.step(environment, &shown, &too_long, stop)? else { return Ok(None) };
        next.extend(too_long.into_iter().map(|(place, _)| place).zip(replies.into_iter().map(end)));
        Ok((0..open.len()).map(|place| next.remove(&place)).collect())
    }

    /// Tokens that the limit of length leaves for a conversation.
    fn left(&self, talk: &Talk) -> usize {
        let prompt = self.shown.prompts.prompt(talk.of.row as usize).0.len();
        self.max_length.saturating_sub(prompt + talk.answer.tokens.len())
    }

    fn show(&self, talk: &Talk) -> Result<Shown> {
        let row = talk.of.row as usize;
        let (json, place) = (self.shown.prompts.prompt(row).1, self.shown.prompts.origin(row));
        let mut fields = self.shown.row(&CompletedPrompt { row: talk.of.row, answers: Vec::new() });
        let prompt = fields.remove("prompt").unwrap_or_default();
        let messages = self.shown.conversation(&talk.answer)?;
        Ok(Shown { row: PromptRow::parse(json, place)?, prompt, fields, messages })
    }

    /// Asks about the conversations at these places, which a limit may end; `None` if it was stopped.
    fn step(
        &self,
        environment: &mut Environment,
        shown: &[Shown],
        places: &[(usize, bool)],
        stop: &AtomicBool,
    ) -> Result<Option<Vec<EnvironmentReply>>> {
        let conversation = |&(place, is_last): &(usize, bool)| {
            let Shown { prompt, fields, messages, .. } = &shown[place];
            let prompt = match prompt {
                Value::String(text) => Prompt::Text(text),
                Value::Array(messages) => Prompt::Messages(messages),
                other => unreachable!("a prompt is a text or messages, not {other}"),
            };
            Conversation { prompt, messages, turn: self.turn, is_last, row: fields }
        };
        let conversations: Vec<Conversation> = places.iter().map(conversation).collect();
        match environment.step(&conversations, stop) {
            Err(JudgeError::Stopped) => Ok(None),
            replies => Ok(Some(replies?)),
        }
    }
}

/// The end that a reply other than messages means.
fn end(reply: EnvironmentReply) -> Next {
    Next::End(match reply {
        EnvironmentReply::End { reward, reason } => JudgeScore { score: Some(reward), said: reason },
        EnvironmentReply::Dropped(why) => JudgeScore { score: None, said: why },
        EnvironmentReply::Messages(_) => unreachable!("a conversation that must end gets no messages"),
    })
}
