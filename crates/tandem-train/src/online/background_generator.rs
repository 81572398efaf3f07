//! Answers that are generated while a step trains.
//!
//! Weights change only in the optimizer step, so background generation reads the training weights.
//! It uses its own stores, arena and process groups. The shared weights are released before the
//! update.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use tandem_comm::Progress;
use tandem_kernels::{DType, Device};
use tandem_model::{Checkpointing, Decoder, LayerExecutor};

use super::Answer;
use super::generate::{Asked, Generation, GenerationContext, LockstepGroup};
use super::sources::PolicyAndReference;
use crate::Result;
use crate::config::Config;
use crate::inputs::RunInputs;
use crate::parallel::DeviceMesh;
use crate::reference::Reference;
use crate::step::TrainStep;
use crate::weights::Policy;

/// Generates this rank's answers with weights that it was lent.
pub struct BackgroundGenerator {
    generation: Generation,
    device: Device,
    decoder: Arc<Decoder>,
    dtype: DType,
    checkpointing: Checkpointing,
    policy: Policy,
    reference: Reference,
    mesh: DeviceMesh,
    together: Option<LockstepGroup>,
}

impl BackgroundGenerator {
    /// Creates readers of `scorer`'s weights on `device`, a second context of its device.
    /// Collective.
    pub fn new(
        generation: Generation,
        config: &Config,
        scorer: &TrainStep,
        device: Device,
        mesh: &mut DeviceMesh,
    ) -> Result<Self> {
        let mut mesh = mesh.duplicate_groups(&config.compute)?;
        let shard = mesh.shard();
        let TrainStep { placement, decoder, dtype, checkpointing, policy, reference, .. } = scorer;
        let (decoder, dtype, checkpointing) = (decoder.clone(), *dtype, *checkpointing);
        let policy = policy.reader(placement, &device, shard)?;
        let reference = reference.reader(placement, &device, shard)?;
        let together = LockstepGroup::from_config(config, shard)?;
        Ok(Self { generation, device, decoder, dtype, checkpointing, policy, reference, mesh, together })
    }

    /// Is lent the weights as they are.
    pub fn acquire(&mut self, scorer: &TrainStep) -> Result<()> {
        scorer.policy.share_with(&mut self.policy);
        scorer.reference.share_with(&mut self.reference);
        Ok(self.device.after(&scorer.placement.device.mark()?)?)
    }

    /// Returns all ranks' responses, or `None` if a rank was stopped. The lent weights are given
    /// back before this returns.
    pub fn answer(
        &mut self,
        asked: &Asked,
        prepared: &RunInputs,
        progress: &Progress,
        stop: &AtomicBool,
    ) -> Result<Option<Vec<Vec<Answer>>>> {
        let Self { generation, device, decoder, dtype, checkpointing, policy, reference, mesh, together } =
            self;
        let executor = LayerExecutor::new(decoder, device, *dtype, *checkpointing);
        let on = GenerationContext { executor, inputs: prepared, progress };
        let mut sources = PolicyAndReference::new(policy, reference);
        let answers = generation.answer(&on, &mut sources, together.as_mut(), mesh, stop, asked);
        // Synchronise: a GPU may still read the weights.
        let read = self.device.synchronize();
        self.release_shared();
        let (answers, ()) = (answers?, read?);
        Ok(answers)
    }

    /// Dry run of generation: allocates for the largest number of completions in progress and the
    /// longest prompts.
    pub fn dry_run(&mut self, scorer: &TrainStep, longest: usize) -> Result<()> {
        self.acquire(scorer)?;
        let Self { generation, device, decoder, dtype, checkpointing, policy, reference, mesh, .. } = self;
        let executor = mesh.join_generation(LayerExecutor::new(decoder, device, *dtype, *checkpointing));
        device.set_place(format_args!("generation"));
        generation.dry_run(&executor, &mut PolicyAndReference::new(policy, reference), longest)?;
        self.release_shared();
        Ok(())
    }

    fn release_shared(&mut self) {
        self.policy.release_shared();
        self.reference.release_shared();
    }
}
