//! The weights that a run starts from.

use tandem_kernels::{DType, Device, Kind};
use tandem_model::{Decoder, FlatWeights, WeightFiles, init};

use crate::Result;
use crate::config::{Config, Weights};
use crate::prepare::Prepared;
use crate::store::Partition;

/// Where weights come from, before a layer of them is in memory.
pub enum Start {
    /// Files on disk.
    Files(WeightFiles),
    /// A seed.
    Random(u64),
}

impl Start {
    /// What the policy (and, by default, the reference) starts from.
    ///
    /// # Errors
    /// If the files cannot be read or do not fit.
    pub fn of_policy(config: &Config, prepared: &Prepared) -> Result<Self> {
        Ok(match &config.weights {
            Weights::Folder | Weights::File(_) => Self::Files(prepared.folder.weights(&prepared.decoder)?),
            Weights::Random => Self::Random(config.seed),
        })
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
    pub fn load_parts(
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
