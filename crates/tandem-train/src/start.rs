//! The weights that a run starts from, and where it puts them.

use std::sync::Arc;

use tandem_comm::Group;
use tandem_kernels::{DType, Device, Kind};
use tandem_model::{Decoder, FlatWeights, WeightFiles, WeightSource, init};

use crate::Result;
use crate::config::{Config, Weights};
use crate::prepare::{Prepared, compute_type};
use crate::store::{FrozenWeights, Partition, Policy, ReplicatedWeights, ShardedWeights, Sharding};

/// Where weights come from, before a layer of them is in memory.
pub enum Start {
    /// Files on disk.
    Files(WeightFiles),
    /// A seed.
    Random(u64),
}

impl Start {
    /// What the policy (and, by default, the reference) starts from: of `decoder`, which may be a slice.
    ///
    /// # Errors
    /// If the files cannot be read or do not fit.
    pub fn of_policy(config: &Config, prepared: &Prepared, decoder: &Decoder) -> Result<Self> {
        Ok(match &config.weights {
            Weights::Folder | Weights::File(_) => Self::Files(prepared.folder.weights(decoder)?),
            Weights::Random => Self::Random(config.seed),
        })
    }

    /// The weights that train: whole, or this rank's part of them. `shard` are the ranks among which it is divided.
    ///
    /// # Errors
    /// If memory runs out, the system refuses a thread, or a rank is lost.
    pub fn policy(
        &self,
        config: &Config,
        decoder: &Arc<Decoder>,
        device: &Device,
        shard: &mut Group,
        partition: &Arc<Partition>,
    ) -> Result<Policy> {
        let dtype = compute_type(config);
        if config.compute.sharding == Sharding::Zero3 {
            let parts = self.load_parts(decoder, device, Kind::Master, partition, |_| {})?;
            let (decoder, partition, own) = (decoder.clone(), partition.clone(), shard.split(0)?);
            let weights = ShardedWeights::masters(device, decoder, partition, own, parts, dtype)?;
            return Ok(Policy::Sharded(Box::new(weights)));
        }
        let masters = self.load(decoder, device, Kind::Master)?;
        Ok(Policy::Replicated(ReplicatedWeights::new(device, decoder.clone(), masters, dtype)?))
    }

    /// Weights that never change, whole or this rank's part of them. `see` is shown every layer, whole but for the slice.
    ///
    /// # Errors
    /// If memory runs out, the system refuses a thread, or a rank is lost.
    pub fn reference(
        &self,
        config: &Config,
        decoder: &Arc<Decoder>,
        device: &Device,
        shard: &mut Group,
        mut see: impl FnMut(&[f32]),
    ) -> Result<Box<dyn WeightSource + Send>> {
        let dtype = compute_type(config);
        if config.compute.sharding == Sharding::Zero3 {
            let partition = Arc::new(Partition::new(decoder, shard.rank(), shard.size()));
            let parts = self.load_parts(decoder, device, Kind::Reference, &partition, see)?;
            let (decoder, own) = (decoder.clone(), shard.split(0)?);
            return Ok(Box::new(ShardedWeights::frozen(device, decoder, partition, own, parts, dtype)?));
        }
        let whole = self.load(decoder, device, Kind::Reference)?;
        if !device.is_meta() {
            whole.layers.iter().for_each(|layer| see(layer.view().as_slice()));
        }
        Ok(Box::new(FrozenWeights::new(device, decoder.clone(), whole, dtype)?))
    }

    /// All weights in device memory.
    ///
    /// # Errors
    /// If memory runs out.
    pub fn load(&self, decoder: &Decoder, device: &Device, kind: Kind) -> Result<FlatWeights> {
        Ok(match self {
            Self::Files(files) => files.load(decoder, device, kind)?,
            Self::Random(seed) => init::init(decoder, device, kind, *seed)?,
        })
    }

    /// This rank's part of every layer in device memory. One whole layer at a time is in host memory; `see` is shown each.
    ///
    /// # Errors
    /// If memory runs out.
    fn load_parts(
        &self,
        decoder: &Decoder,
        device: &Device,
        kind: Kind,
        partition: &Partition,
        mut see: impl FnMut(&[f32]),
    ) -> Result<FlatWeights> {
        let (mut layers, mut flat) = (Vec::new(), Vec::new());
        for (index, layer) in decoder.layers().into_iter().enumerate() {
            let owned = partition.owned(index);
            let mut part = device.alloc(kind, 1, owned.len(), DType::F32)?;
            if !device.is_meta() {
                flat.clear();
                flat.resize(partition.len(index), 0.0);
                match self {
                    Self::Files(files) => files.read_layer(index, &mut flat),
                    Self::Random(seed) => init::init_layer(decoder, layer, *seed, &mut flat),
                }
                see(&flat);
                part.view_mut().into_slice().copy_from_slice(&flat[owned]);
            }
            layers.push(part);
        }
        Ok(FlatWeights { layers })
    }
}
