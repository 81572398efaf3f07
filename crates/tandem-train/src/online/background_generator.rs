//! Answers that are generated while a step trains.
//!
//! Weights do not change before a step's update, so generation reads those that train, beside the passes that do: through stores of
//! its own, which bring layers to a memory of its own, among groups of its own. What it reads is lent, and is given back before the
//! update.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use tandem_comm::Progress;
use tandem_kernels::{DType, Device};
use tandem_model::{Checkpointing, Decoder, Walk};

use super::Answer;
use super::generate::{Asked, Generation, On, Together};
use super::sources::Both;
use crate::Result;
use crate::config::Config;
use crate::inputs::Prepared;
use crate::parallel::Mesh;
use crate::reference::Reference;
use crate::step::Scorer;
use crate::weights::Policy;

/// Generates this rank's answers with weights that it was lent.
pub struct Borrower {
    generation: Generation,
    device: Device,
    decoder: Arc<Decoder>,
    dtype: DType,
    checkpointing: Checkpointing,
    policy: Policy,
    reference: Reference,
    mesh: Mesh,
    together: Option<Together>,
}

impl Borrower {
    /// Reads what `scorer` has, on `device`, which is beside that one's. All ranks call this.
    pub fn new(
        generation: Generation,
        config: &Config,
        scorer: &Scorer,
        device: Device,
        mesh: &mut Mesh,
    ) -> Result<Self> {
        let mut mesh = mesh.beside(&config.compute)?;
        let shard = mesh.shard();
        let Scorer { homes, decoder, dtype, checkpointing, policy, reference, .. } = scorer;
        let (decoder, dtype, checkpointing) = (decoder.clone(), *dtype, *checkpointing);
        let policy = policy.reader(homes, &device, shard)?;
        let reference = reference.reader(homes, &device, shard)?;
        let together = Together::of(config, shard)?;
        Ok(Self { generation, device, decoder, dtype, checkpointing, policy, reference, mesh, together })
    }

    /// Is lent the weights as they are.
    pub fn borrow(&mut self, scorer: &Scorer) -> Result<()> {
        scorer.policy.lend(&mut self.policy);
        scorer.reference.lend(&mut self.reference);
        Ok(self.device.after(&scorer.homes.device.mark()?)?)
    }

    /// Returns all ranks' responses, or `None` if a rank was stopped. The lent weights are given back before this returns.
    pub fn answer(
        &mut self,
        asked: &[Asked],
        prepared: &Prepared,
        progress: &Progress,
        stop: &AtomicBool,
    ) -> Result<Option<Vec<Vec<Answer>>>> {
        let Self { generation, device, decoder, dtype, checkpointing, policy, reference, mesh, together } =
            self;
        let walk = Walk::new(decoder, device, *dtype, *checkpointing);
        let Prepared { train: prompts, tokenizer, .. } = prepared;
        let on = On { walk, prompts, tokenizer, progress };
        let mut sources = Both::of(policy, reference);
        let answers = generation.answer(&on, &mut sources, together.as_mut(), mesh, stop, asked);
        // What a GPU still reads is not given back.
        let read = self.device.synchronize();
        self.give_back();
        let (answers, ()) = (answers?, read?);
        Ok(answers)
    }

    /// Takes the memory that answering takes, on a device that computes nothing, where no prompt has more than `longest` tokens.
    pub fn rehearse(&mut self, scorer: &Scorer, longest: usize) -> Result<()> {
        self.borrow(scorer)?;
        let Self { generation, device, decoder, dtype, checkpointing, policy, reference, mesh, .. } = self;
        let walk = Walk { split: mesh.split(), ..Walk::new(decoder, device, *dtype, *checkpointing) };
        device.note(format_args!("generation"));
        generation.rehearse(&walk, &mut Both::of(policy, reference), longest)?;
        self.give_back();
        Ok(())
    }

    fn give_back(&mut self) {
        self.policy.give_back();
        self.reference.give_back();
    }
}
