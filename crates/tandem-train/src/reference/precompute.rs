//! The pass that computes the reference's log-probabilities once, before training.

use std::collections::BTreeMap;

use tandem_data::token_cache::TokenCache;
use tandem_kernels::Format;
use tandem_kernels::cuda::driver::MatmulChoice;
use tandem_model::{Decoder, LayerExecutor, LayerId, TensorParallelOps, WeightSource};

use crate::Result;
use crate::config::Config;
use crate::events::{Event, Observer};
use crate::inputs::RunInputs;
use crate::metrics::Split;
use crate::parallel::{DeviceMesh, StagedExecutor};
use crate::placement::MemoryPlacement;
use crate::reference::{Reference, RowScores};

/// Builds the walk of the pass that precomputes the reference; `split` as in [`LayerExecutor`].
pub(crate) fn layer_executor<'a>(
    config: &Config,
    decoder: &'a Decoder,
    placement: &'a MemoryPlacement,
    split: Option<&'a dyn TensorParallelOps>,
) -> LayerExecutor<'a> {
    let compute = &config.compute;
    let executor =
        LayerExecutor::new(decoder, &placement.device, compute.compute_type(), compute.checkpointing.into());
    LayerExecutor { split, room: placement.rooms.reference, ..executor }
}

/// Content hashes of loaded weights.
pub(super) struct Fingerprint<'a> {
    decoder: &'a Decoder,
    /// Per owned layer: hashes of its weights and adapters.
    layers: BTreeMap<LayerId, blake3::Hasher>,
}

impl<'a> Fingerprint<'a> {
    pub(super) fn new(decoder: &'a Decoder) -> Self {
        Self { decoder, layers: BTreeMap::new() }
    }

    pub(super) fn see(&mut self, layer: LayerId, weights: &[f32]) {
        if self.decoder.owns(layer) {
            self.layers.entry(layer).or_default().update(bytemuck::cast_slice(weights));
        }
    }

    fn layers(&self) -> Vec<blake3::Hash> {
        self.layers.values().map(blake3::Hasher::finalize).collect()
    }
}

/// The pass that computes the reference's log-probabilities once.
pub(super) struct Precompute<'a> {
    pub(super) config: &'a Config,
    pub(super) prepared: &'a RunInputs,
    pub(super) placement: &'a MemoryPlacement,
    pub(super) decoder: &'a Decoder,
    pub(super) splits: &'a [Split],
    pub(super) observer: &'a mut dyn Observer,
}

impl Precompute<'_> {
    pub(super) fn run(
        &mut self,
        mesh: &mut DeviceMesh,
        weights: &mut dyn WeightSource,
        print: &Fingerprint,
        format: Format,
    ) -> Result<Reference> {
        // A model in slices has a fingerprint of its own: its arithmetic differs.
        let fingerprint = mesh.whole_fingerprint(self.decoder, &print.layers())?;
        let model = self.decoder.whole();
        let (spec, adapter, residual) = (model.spec(), model.adapter(), model.residual());
        let computes = format!("{spec:?} {adapter:?} {residual:?}");
        let mut scores = |split: Split| match self.prepared.tokens(split) {
            Some(cache) if self.splits.contains(&split) => {
                let mut key = blake3::Hasher::new();
                key.update(fingerprint.as_bytes());
                // The same weights make another model with another rotation, norm or scale of an adapter.
                key.update(computes.as_bytes());
                key.update(format.name().as_bytes());
                key.update(cache.content_hash().as_bytes());
                key.update(self.config.compute.compute_type().name().as_bytes());
                let orders = [self.config.compute.sums_in_blocks(), self.config.data.share_prefix];
                key.update(&orders.map(u8::from));
                if self.config.compute.fp8_matmul {
                    key.update(b"fp8_matmul");
                }
                // Else the policy would differ from itself in the first step, where another machine
                // or version left the scores.
                key.update(self.placement.device.arithmetic().as_bytes());
                for MatmulChoice { shape, algorithm } in &*self.placement.matmuls {
                    key.update(format!("{shape} {algorithm}\n").as_bytes());
                }
                if let Some(alpha) = self.config.objective.ld_alpha {
                    key.update(&alpha.to_le_bytes());
                }
                self.for_split(mesh, weights, split, cache, &key.finalize()).map(Some)
            }
            _ => Ok(None),
        };
        Ok(Reference::Precomputed { train: scores(Split::Train)?, eval: scores(Split::Eval)? })
    }

    fn for_split(
        &mut self,
        mesh: &mut DeviceMesh,
        weights: &mut dyn WeightSource,
        split: Split,
        cache: &TokenCache,
        key: &blake3::Hash,
    ) -> Result<RowScores> {
        let Self { config, prepared, placement, decoder, observer, .. } = self;
        let path = RowScores::path(&config.cache_folder(), &key.to_hex()[..32]);
        let rows = match split {
            Split::Train => prepared.training_rows(config),
            Split::Eval => (0..cache.num_rows() as u32).collect(),
        };
        // The first rank looks, for the others may not see its disk.
        let world = mesh.world();
        let mut found = if world.rank() == 0 { RowScores::read(&path, cache.num_rows()) } else { None };
        let mut is_there = [u8::from(found.as_ref().is_some_and(|found| found.has(&rows)))];
        world.broadcast(&mut is_there, 0)?;
        if is_there == [1] {
            let scores = found.get_or_insert_with(|| RowScores(vec![[0.0; 2]; cache.num_rows()]));
            world.broadcast(scores.0.as_flattened_mut(), 0)?;
            return Ok(found.expect("just put there"));
        }
        let (data, split_over, stages) = mesh.forward_groups();
        let executor =
            StagedExecutor { executor: layer_executor(config, decoder, placement, split_over), stages };
        let mut batcher = prepared.batcher(config);
        let share = batcher.share(cache, &rows, data.rank(), data.size());
        let batches = share.own_micro_batches.iter().map(|&index| batcher.build(cache, share.part(index)));
        let total = rows.len() as u64;
        let progress = |done: u64| observer.event(&Event::Reference { split, done: done.min(total), total });
        let idle =
            if config.compute.sharded().weights { share.rounds - share.own_micro_batches.len() } else { 0 };
        let mut scores = RowScores::compute(&executor, weights, cache, data, batches, idle, progress)?;
        scores.keep(&rows, found.as_ref());
        if mesh.world().rank() == 0 {
            scores.write(&path)?;
        }
        Ok(scores)
    }
}
