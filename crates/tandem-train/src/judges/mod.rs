//! The panel of judges that `[[judges]]` describes.

mod reward_judge;
pub mod reward_model;

use std::sync::Arc;

pub use tandem_judge::register;
use tandem_judge::{CommandJudge, EndpointJudge, Judge, JudgeError, Member, OwnJudge, Panel, RuleJudge};
use tandem_kernels::{Backend, DType, Device};
use tandem_model::ModelFolder;

use crate::Result;
use crate::config::{JudgeKind, JudgeSection, RewardSection};
use crate::judges::reward_judge::RewardJudge;

/// Receives each stderr line of a judge's command: the judge's name and the line.
pub type JudgeLine = Arc<dyn Fn(&str, &str) + Send + Sync>;

/// Builds the judges: starts programs, opens caches, loads reward models. These compute on
/// `device`, in `dtype`. `on_line` is called on threads of the judges' own.
///
/// # Errors
/// An option is invalid, a program cannot be started, a key variable is not set, or a model cannot
/// be loaded.
pub fn panel(sections: &[JudgeSection], device: &Device, dtype: DType, on_line: &JudgeLine) -> Result<Panel> {
    let member = |section: &JudgeSection| -> Result<Member> {
        let JudgeSection { weight, may_abstain, .. } = *section;
        Ok(Member { judge: judge(section, device, dtype, on_line)?, weight, may_abstain })
    };
    let members = sections.iter().map(member).collect::<Result<_>>()?;
    Ok(Panel::new(members)?)
}

/// Dry-run device with the memory of all reward-model judges, if any.
pub fn memory(sections: &[JudgeSection], backend: Backend, dtype: DType) -> Result<Option<Device>> {
    let device = Device::meta_of(backend);
    let open = |section: &JudgeSection| -> Option<Result<RewardJudge, JudgeError>> {
        let JudgeKind::Reward(model) = &section.kind else { return None };
        Some(RewardJudge::open(&section.name, model, &device, dtype))
    };
    let mut judges = sections.iter().filter_map(open).collect::<Result<Vec<_>, _>>()?;
    judges.iter_mut().try_for_each(RewardJudge::dry_run)?;
    Ok((!judges.is_empty()).then_some(device))
}

/// Lists the head sizes of the reward models among judges.
///
/// # Errors
/// A folder holds no reward model.
pub fn head_dims(sections: &[JudgeSection]) -> Result<Vec<usize>> {
    let of_judge = |section: &JudgeSection| -> Option<Result<usize>> {
        let JudgeKind::Reward(RewardSection { model, .. }) = &section.kind else { return None };
        let opened = ModelFolder::open_reward(model, 0);
        Some(opened.map(|folder| folder.spec().attention.head_dim).map_err(Into::into))
    };
    sections.iter().filter_map(of_judge).collect()
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
        JudgeKind::Own(config) => Box::new(OwnJudge::new(name, config)?),
        JudgeKind::Reward(section) => Box::new(RewardJudge::open(name, section, device, dtype)?),
    })
}
