//! The panel of judges that `[[judges]]` describes.

pub mod reward_judge;
pub mod reward_model;

use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use serde_json::{Map, Value};
use tandem_data::token_cache::TokenCache;
use tandem_judge::{
    Candidate, CommandJudge, EndpointJudge, Group, Judge, JudgeError, Member, Panel, Prompt, Rule, RuleJudge,
};
use tandem_kernels::{Backend, DType, Device};

use crate::Result;
use crate::config::{JudgeKind, JudgeSection};
use crate::judges::reward_judge::RewardJudge;

/// What is told each line that a judge's command writes to stderr: the judge's name, and the line.
pub type JudgeLine = Arc<dyn Fn(&str, &str) + Send + Sync>;

/// Builds the judges: starts programs, opens caches, loads reward models. These compute on `device`, in `dtype`. `on_line` is called on
/// threads of the judges' own.
///
/// # Errors
/// If an option makes no sense, a program cannot be started, a key's variable is not set, or a model cannot be loaded.
pub fn panel(sections: &[JudgeSection], device: &Device, dtype: DType, on_line: &JudgeLine) -> Result<Panel> {
    let member = |section: &JudgeSection| -> Result<Member> {
        Ok(Member { judge: judge(section, device, dtype, on_line)?, weight: section.weight })
    };
    let members = sections.iter().map(member).collect::<Result<_>>()?;
    Ok(Panel::new(members)?)
}

/// What the reward models among the judges take of a device, if there are any: one that computes nothing and has all of them.
///
/// # Errors
/// If a model cannot be opened.
pub fn memory(sections: &[JudgeSection], backend: Backend, dtype: DType) -> Result<Option<Device>> {
    let device = Device::meta_of(backend);
    let open = |section: &JudgeSection| -> Option<Result<RewardJudge, JudgeError>> {
        let JudgeKind::Reward(model) = &section.kind else { return None };
        Some(RewardJudge::open(&section.name, model, &device, dtype))
    };
    let mut judges = sections.iter().filter_map(open).collect::<Result<Vec<_>, _>>()?;
    judges.iter_mut().try_for_each(RewardJudge::rehearse)?;
    Ok((!judges.is_empty()).then_some(device))
}

/// Whether every row has what rules compare answers with.
///
/// # Errors
/// If one has not; or an option makes no sense.
pub fn check_rows(sections: &[JudgeSection], prompts: &TokenCache) -> Result<()> {
    let of_rows = sections.iter().filter_map(|section| match &section.kind {
        JudgeKind::Rule(rule @ (Rule::Exact(_) | Rule::Regex(_))) => Some((&section.name, rule)),
        _ => None,
    });
    let mut judges = of_rows
        .map(|(name, rule)| RuleJudge::new(name, rule.clone()))
        .collect::<Result<Vec<_>, JudgeError>>()?;
    for row in 0..if judges.is_empty() { 0 } else { prompts.num_rows() } {
        let mut fields: Map<String, Value> =
            serde_json::from_slice(prompts.prompt(row).1).expect("it was written as JSON");
        fields.remove("prompt");
        let place = prompts.origin(row).to_string();
        // What is asked of is the row: any answer will do.
        let answer = Candidate { text: "", tokens: 0, is_ended: true };
        let group = Group { place: &place, prompt: Prompt::Text(""), row: &fields, answers: vec![answer] };
        for judge in &mut judges {
            judge.judge(std::slice::from_ref(&group), &AtomicBool::new(false))?;
        }
    }
    Ok(())
}

fn judge(
    JudgeSection { name, kind, .. }: &JudgeSection,
    device: &Device,
    dtype: DType,
    on_line: &JudgeLine,
) -> Result<Box<dyn Judge>> {
    Ok(match kind {
        JudgeKind::Rule(rule) => Box::new(RuleJudge::new(name, rule.clone())?),
        JudgeKind::Command(config) => {
            let (judge, on_line) = (name.clone(), on_line.clone());
            let on_stderr = Arc::new(move |line: &str| on_line(&judge, line));
            Box::new(CommandJudge::new(name, config.clone(), on_stderr)?)
        }
        JudgeKind::Endpoint(config) => Box::new(EndpointJudge::new(name, config.clone())?),
        JudgeKind::Reward(section) => Box::new(RewardJudge::open(name, section, device, dtype)?),
    })
}
