//! The policy's weights: those that train, and the frozen base under an adapter.

use tandem_comm::ProcessGroup;
use tandem_kernels::{Device, Format, Tensor, ops};
use tandem_model::{
    AdapterWeights, FlatWeights, LayerId, LayerWeights, ModelError, Result as ModelResult, WeightSource,
};

use crate::Result;
use crate::parallel::Partition;
use crate::placement::{MemoryPlacement, OffloadedStorage};
use crate::weights::{FrozenWeights, ReplicatedWeights, ShardedWeights};

/// The policy's weights.
pub struct Policy {
    trained: Trained,
    frozen: Option<BaseAndReferenceAdapter>,
}

/// Trainable weights.
pub enum Trained {
    /// Whole on every rank.
    Replicated(ReplicatedWeights),
    /// Sharded or offloaded.
    Sharded(Box<ShardedWeights>),
}

/// Frozen base of an adapter and of a reference adapter.
struct BaseAndReferenceAdapter {
    base: Box<FrozenWeights>,
    /// The reference's adapter on the same base.
    reference: Option<ReplicatedWeights>,
    /// Whether the reference adapter is an EMA of the policy's.
    follows: bool,
}

impl Policy {
    /// Weights that all train.
    pub fn full(trained: Trained) -> Self {
        Self { trained, frozen: None }
    }

    /// An adapter, whole on every rank, on a base.
    pub fn adapted(adapter: ReplicatedWeights, base: Box<FrozenWeights>) -> Self {
        Self {
            trained: Trained::Replicated(adapter),
            frozen: Some(BaseAndReferenceAdapter { base, reference: None, follows: false }),
        }
    }

    /// Creates a read-only view of the weights for another thread. Layers are gathered onto
    /// `device` over `shard`. Collective: every rank of `shard` calls it.
    pub fn reader(
        &self,
        placement: &MemoryPlacement,
        device: &Device,
        shard: &mut ProcessGroup,
    ) -> Result<Self> {
        let trained = match &self.trained {
            Trained::Replicated(weights) => Trained::Replicated(weights.reader()),
            Trained::Sharded(weights) => Trained::Sharded(Box::new(weights.reader(
                device,
                OffloadedStorage::from_placement(placement)?,
                shard,
            )?)),
        };
        let frozen = |BaseAndReferenceAdapter { base, reference, follows }: &BaseAndReferenceAdapter| -> Result<BaseAndReferenceAdapter> {
            Ok(BaseAndReferenceAdapter {
                base: Box::new(base.reader(device, OffloadedStorage::from_placement(placement)?, shard)?),
                reference: reference.as_ref().map(ReplicatedWeights::reader),
                follows: *follows,
            })
        };
        Ok(Self { trained, frozen: self.frozen.as_ref().map(frozen).transpose()? })
    }

    /// Lends these weights to a reader of them: nothing is written before it has given them back.
    ///
    /// # Panics
    /// It is not a reader of these weights.
    pub fn share_with(&self, reader: &mut Self) {
        match (&self.trained, &mut reader.trained) {
            (Trained::Replicated(own), Trained::Replicated(reader)) => own.share_with(reader),
            (Trained::Sharded(own), Trained::Sharded(reader)) => own.share_with(reader),
            _ => panic!("weights are lent to a reader of them"),
        }
        if let (Some(own), Some(BaseAndReferenceAdapter { reference: Some(reader), .. })) =
            (self.reference(), &mut reader.frozen)
        {
            own.share_with(reader);
        }
    }

    /// Releases the shared weights of a reader.
    pub fn release_shared(&mut self) {
        match &mut self.trained {
            Trained::Replicated(weights) => weights.release_shared(),
            Trained::Sharded(weights) => weights.release_shared(),
        }
        if let Some(frozen) = &mut self.frozen {
            frozen.base.release_all();
            frozen.reference.iter_mut().for_each(ReplicatedWeights::release_shared);
        }
    }

    /// Lets a reference with this adapter share the base; `None` for one with none.
    ///
    /// # Panics
    /// The policy has no base.
    pub fn share_base(&mut self, adapter: Option<ReplicatedWeights>) {
        self.frozen.as_mut().expect(SHARES).reference = adapter;
    }

    /// Lets a reference with a copy of this adapter share the base and follow the policy.
    ///
    /// # Panics
    /// As [`Policy::share_base`].
    pub fn attach_ema_reference(&mut self, copy: ReplicatedWeights) {
        let frozen = self.frozen.as_mut().expect(SHARES);
        (frozen.reference, frozen.follows) = (Some(copy), true);
    }

    /// The adapter of a reference that shares the base and follows.
    pub fn ema_reference(&self) -> Option<&ReplicatedWeights> {
        self.frozen.as_ref().filter(|frozen| frozen.follows)?.reference.as_ref()
    }

    /// The same, mutable; call [`Policy::refresh`] afterwards.
    pub fn follower_mut(&mut self) -> Option<&mut ReplicatedWeights> {
        self.frozen.as_mut().filter(|frozen| frozen.follows)?.reference.as_mut()
    }

    /// Pulls a reference that shares the base towards the policy: `weight · policy + (1 − weight) ·
    /// reference`.
    pub fn update_ema_reference(&mut self, device: &Device, weight: f32) -> Result<()> {
        let Self {
            trained: Trained::Replicated(own),
            frozen: Some(BaseAndReferenceAdapter { reference: Some(theirs), .. }),
        } = self
        else {
            return Ok(());
        };
        mix(device, own.masters(), weight, theirs.masters_mut())?;
        theirs.refresh(device)
    }

    /// Moves these weights towards another policy's with the same shards.
    pub fn follow(&mut self, device: &Device, leader: &Self, weight: f32) -> Result<()> {
        let home = self.home().clone();
        mix(&home, leader.masters().0, weight, self.masters_mut())?;
        self.refresh(device)
    }

    /// The adapter of the reference that shares the base, if it has one.
    pub fn reference(&self) -> Option<&ReplicatedWeights> {
        self.frozen.as_ref()?.reference.as_ref()
    }

    /// This rank's master weights and their partition.
    pub fn masters(&self) -> (&FlatWeights, &Partition) {
        match &self.trained {
            Trained::Replicated(weights) => (weights.masters(), weights.partition()),
            Trained::Sharded(weights) => (weights.parts(), weights.partition()),
        }
    }

    /// The same, mutable; call [`Policy::refresh`] afterwards.
    pub fn masters_mut(&mut self) -> &mut FlatWeights {
        match &mut self.trained {
            Trained::Replicated(weights) => weights.masters_mut(),
            Trained::Sharded(weights) => weights.parts_mut(),
        }
    }

    /// Masters that this rank holds of each layer, and the compute copy of their first elements
    /// where there is one.
    pub fn layers_mut(&mut self) -> Vec<(&mut Tensor, Option<&mut Tensor>)> {
        match &mut self.trained {
            Trained::Replicated(weights) => weights.layers_mut().collect(),
            Trained::Sharded(weights) => {
                let parts = weights.parts_mut();
                parts.layers.iter_mut().map(|part| (part, None)).collect()
            }
        }
    }

    /// After the update of this rank's shard by `updated`: gathers the others' shards, if held
    /// here.
    pub fn gather(&mut self, device: &Device, updated: &Partition, group: &mut ProcessGroup) -> Result<()> {
        match &mut self.trained {
            Trained::Replicated(weights) => weights.gather(device, updated, group),
            Trained::Sharded(weights) => weights.gather(updated, group),
        }
    }

    /// Recomputes copies derived from the masters after an external write.
    pub fn refresh(&mut self, device: &Device) -> Result<()> {
        self.follower_mut().map_or(Ok(()), |follower| follower.refresh(device))?;
        match &mut self.trained {
            Trained::Replicated(weights) => weights.refresh(device),
            Trained::Sharded(_) => Ok(()),
        }
    }

    /// Device that holds and updates the masters.
    pub fn home(&self) -> &Device {
        match &self.trained {
            Trained::Replicated(weights) => weights.device(),
            Trained::Sharded(weights) => weights.home(),
        }
    }

    /// Copies a whole layer's masters into host memory. The other ranks [`Policy::participate_in_gather`] the
    /// same.
    pub fn read_layer(&mut self, index: usize, flat: &mut [f32]) -> Result<()> {
        match &mut self.trained {
            Trained::Replicated(weights) => {
                let masters = weights.masters().layers[index].view();
                weights.device().host_read(masters, |masters| flat.copy_from_slice(masters))?;
                Ok(())
            }
            Trained::Sharded(weights) => weights.read_layer(index, flat),
        }
    }

    /// Participates in another rank's gather of a layer.
    pub fn participate_in_gather(&mut self, index: usize) -> Result<()> {
        let Trained::Sharded(weights) = &mut self.trained else { return Ok(()) };
        if !weights.partition().is_divided() {
            return Ok(());
        }
        let mut flat = vec![0.0; weights.partition().len(index)];
        weights.read_layer(index, &mut flat)
    }

    fn source(&mut self) -> &mut dyn WeightSource {
        match (&mut self.frozen, &mut self.trained) {
            (Some(frozen), _) => frozen.base.as_mut(),
            (None, Trained::Replicated(weights)) => weights,
            (None, Trained::Sharded(weights)) => weights.as_mut(),
        }
    }
}

const SHARES: &str = "only an adapter leaves a base to share";

fn mix(device: &Device, leader: &FlatWeights, weight: f32, follower: &mut FlatWeights) -> Result<()> {
    for (own, theirs) in leader.layers.iter().zip(&mut follower.layers) {
        ops::mix(device, own.view(), weight, theirs.view_mut())?;
        own.evict_pages();
        theirs.evict_pages();
    }
    Ok(())
}

/// A layer of an adapter.
fn adapter_layer(weights: &ReplicatedWeights, layer: LayerId) -> Option<AdapterWeights<'_>> {
    let adapter = weights.decoder().adapter()?;
    Some(AdapterWeights { adapter, layer, weights: weights.layer(layer) })
}

impl WeightSource for Policy {
    fn prefetch(&mut self, layer: LayerId) -> ModelResult<()> {
        self.source().prefetch(layer)
    }

    fn fetch(&mut self, layer: LayerId) -> ModelResult<LayerWeights<'_>> {
        match (&mut self.frozen, &mut self.trained) {
            (None, Trained::Replicated(weights)) => weights.fetch(layer),
            (None, Trained::Sharded(weights)) => weights.fetch(layer),
            (Some(BaseAndReferenceAdapter { base, .. }), Trained::Replicated(weights)) => {
                Ok(base.fetch(layer)?.with_adapter(adapter_layer(weights, layer)))
            }
            (Some(_), Trained::Sharded(_)) => unreachable!("an adapter is whole on every rank"),
        }
    }

    fn packed_format(&self) -> Option<Format> {
        self.frozen.as_ref().and_then(|frozen| frozen.base.packed_format())
    }

    fn fetch_packed(&mut self, layer: LayerId) -> ModelResult<LayerWeights<'_>> {
        if self.frozen.is_none() {
            return self.fetch(layer);
        }
        let (Some(BaseAndReferenceAdapter { base, .. }), Trained::Replicated(weights)) =
            (&mut self.frozen, &self.trained)
        else {
            unreachable!("an adapter is whole on every rank")
        };
        Ok(base.fetch_packed(layer)?.with_adapter(adapter_layer(weights, layer)))
    }

    fn fetch_both(
        &mut self,
        layer: LayerId,
        may_be_packed: bool,
    ) -> ModelResult<(LayerWeights<'_>, LayerWeights<'_>)> {
        let (Some(BaseAndReferenceAdapter { base, reference, .. }), Trained::Replicated(weights)) =
            (&mut self.frozen, &self.trained)
        else {
            return Err(ModelError::Invalid(SHARES.to_owned()));
        };
        let reads_all = reference.as_ref().is_some_and(|weights| weights.decoder().has_dora());
        let base = base.fetch_for(layer, may_be_packed && !reads_all)?;
        let of_reference = reference.as_ref().and_then(|weights| adapter_layer(weights, layer));
        Ok((base.with_adapter(adapter_layer(weights, layer)), base.with_adapter(of_reference)))
    }

    fn release(&mut self, layer: LayerId) {
        self.source().release(layer);
    }

    fn release_all(&mut self) {
        self.source().release_all();
    }
}

/// The reference that shares a policy's base, by itself.
pub struct SharedReference<'a>(pub &'a mut Policy);

impl WeightSource for SharedReference<'_> {
    fn prefetch(&mut self, layer: LayerId) -> ModelResult<()> {
        self.0.prefetch(layer)
    }

    fn fetch(&mut self, layer: LayerId) -> ModelResult<LayerWeights<'_>> {
        Ok(self.0.fetch_both(layer, false)?.1)
    }

    fn packed_format(&self) -> Option<Format> {
        self.0.packed_format()
    }

    fn fetch_packed(&mut self, layer: LayerId) -> ModelResult<LayerWeights<'_>> {
        let Some(BaseAndReferenceAdapter { base, reference, .. }) = &mut self.0.frozen else {
            return Err(ModelError::Invalid(SHARES.to_owned()));
        };
        let adapter = reference.as_ref().and_then(|weights| adapter_layer(weights, layer));
        Ok(base.fetch_packed(layer)?.with_adapter(adapter))
    }

    fn release(&mut self, layer: LayerId) {
        self.0.release(layer);
    }

    fn release_all(&mut self) {
        self.0.release_all();
    }
}
