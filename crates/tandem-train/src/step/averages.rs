//! Weights of evaluations in the place of those that train.

use super::{TrainState, TrainStep};
use crate::Result;
use crate::parallel::DeviceMesh;

impl TrainStep {
    /// Runs `work` with the weights of evaluations. Training goes on with the same bits afterwards.
    /// Collective.
    ///
    /// # Errors
    /// `work` fails, or another rank. Training cannot go on then.
    pub fn with_evaluation_weights<T>(
        &mut self,
        learner: &mut TrainState,
        mesh: &mut DeviceMesh,
        work: impl FnOnce(&mut Self, &mut DeviceMesh) -> Result<T>,
    ) -> Result<T> {
        if !self.put_evaluation_weights(learner, mesh, true)? {
            return work(self, mesh);
        }
        let done = work(self, mesh)?;
        self.finish_writes()?;
        learner.optimizer.end_evaluation(&mut self.policy)?;
        self.share_written(learner, mesh)?;
        Ok(done)
    }

    /// Puts the weights of evaluations in the place of those that train, after the last step. Collective.
    pub fn keep_evaluation_weights(&mut self, learner: &mut TrainState, mesh: &mut DeviceMesh) -> Result<()> {
        self.put_evaluation_weights(learner, mesh, false).map(drop)
    }

    /// Puts the weights of evaluations in the place of those that train; returns whether they are others.
    fn put_evaluation_weights(
        &mut self,
        learner: &mut TrainState,
        mesh: &mut DeviceMesh,
        goes_on: bool,
    ) -> Result<bool> {
        self.finish_writes()?;
        let are_others = learner.optimizer.begin_evaluation(&mut self.policy, goes_on)?;
        if are_others {
            self.share_written(learner, mesh)?;
        }
        Ok(are_others)
    }

    /// Waits for a GPU before the CPU writes what lies in the GPU's file: no stream waits for the CPU.
    pub(super) fn finish_writes(&self) -> Result<()> {
        if self.placement.staging_pair().is_some() {
            self.placement.device.synchronize()?;
        }
        Ok(())
    }

    /// Brings every rank what the others have written, and makes the compute copies.
    fn share_written(&mut self, learner: &TrainState, mesh: &mut DeviceMesh) -> Result<()> {
        let (device, partition) = (&self.placement.device, learner.optimizer.partition());
        if partition.is_divided() {
            self.policy.gather(device, partition, mesh.shard())
        } else {
            self.policy.refresh(device)
        }
    }
}
