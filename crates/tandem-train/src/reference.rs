//! The reference policy: a view, not a second model wherever that can be had.
//!
//! `precompute` runs the reference over all rows once, keeps two numbers a row on disk, keyed by the content of
//! weights and tokens, and is then gone. `model` keeps a second set of weights and scores each micro-batch.

use std::collections::BTreeMap;
use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use tandem_comm::{Group, Reduction};
use tandem_data::token_cache::TokenCache;
use tandem_kernels::ops::HeadScores;
use tandem_kernels::{DType, Device, Forest, Format, Kind, ops};
use tandem_model::{Decoder, FlatWeights, LayerId, Streams, Walk, WeightSource};

use crate::config::{Config, ReferenceKind};
use crate::events::{Event, Observer};
use crate::homes::Homes;
use crate::mesh::Mesh;
use crate::metrics::Split;
use crate::micro_batch::MicroBatch;
use crate::prepare::{Decoders, Prepared, cache_folder, compute_type, partition, to_walk};
use crate::stages::StagedWalk;
use crate::start::{See, Start, adapter_masters};
use crate::store::{Policy, ReplicatedWeights, Sharding, SharedReference};
use crate::{Result, TrainError};

/// Where reference log-probabilities come from.
pub enum Reference {
    /// The loss uses none.
    None,
    /// Computed once, before training.
    Precomputed {
        /// Of the training rows, if they are used.
        train: Option<RowScores>,
        /// Of the evaluation rows, if they are used.
        eval: Option<RowScores>,
    },
    /// A second set of weights.
    Model(Box<dyn WeightSource + Send>),
    /// A second set of weights that is pulled towards the policy.
    Followed(Box<Policy>),
    /// The policy's base, with another adapter or none: it goes along with the policy.
    Shared,
}

/// Summed log-probabilities of the answers of each row: `[chosen, rejected]`.
#[derive(Clone, Debug, PartialEq)]
pub struct RowScores(pub Vec<[f64; 2]>);

impl Reference {
    /// Whether it goes along with the policy, through the same layers.
    pub fn is_shared(&self) -> bool {
        matches!(self, Self::Shared)
    }

    /// Weights of its own that follow the policy.
    pub fn follower(&mut self) -> Option<&mut Policy> {
        match self {
            Self::Followed(weights) => Some(weights.as_mut()),
            _ => None,
        }
    }

    /// Weights of its own.
    fn weights(&mut self) -> Option<&mut dyn WeightSource> {
        match self {
            Self::Model(weights) => Some(weights.as_mut()),
            Self::Followed(weights) => Some(weights.as_mut()),
            Self::None | Self::Precomputed { .. } | Self::Shared => None,
        }
    }

    /// Summed log-probability of each sequence of a micro-batch; `None` without a reference, where a model's come out on
    /// another stage, or where they come with the policy's.
    ///
    /// # Errors
    /// If the forward pass fails.
    pub fn log_probs(
        &mut self,
        walk: &StagedWalk<'_>,
        split: Split,
        batch: &MicroBatch,
        scores: &mut HeadScores,
    ) -> Result<Option<Vec<f64>>> {
        match self {
            Self::None | Self::Shared => Ok(None),
            Self::Precomputed { train, eval } => {
                let rows = match split {
                    Split::Train => train,
                    Split::Eval => eval,
                };
                let rows = rows.as_ref().expect("precomputed for every split that is used");
                Ok(Some(batch.rows.iter().flat_map(|&row| rows.0[row as usize]).collect()))
            }
            Self::Model(_) | Self::Followed(_) => {
                let weights = self.weights().expect("it has some");
                walk.forward(weights, &batch.forest, Streams::one(scores), false)?;
                Ok(walk.is_last().then(|| sequence_log_probs(&batch.forest, scores)))
            }
        }
    }
}

impl Reference {
    /// What [`Reference::log_probs`] does for a rank that has no batch while others have one.
    ///
    /// # Errors
    /// If weights cannot be had.
    pub fn idle(&mut self, walk: &Walk<'_>) -> Result<()> {
        self.weights().map_or(Ok(()), |weights| Ok(walk.idle_forward(weights)?))
    }
}

/// Sums token log-probabilities into their sequences, in f64 and in the order of the token axis.
pub fn sequence_log_probs(forest: &Forest, scores: &HeadScores) -> Vec<f64> {
    let mut sums = vec![0.0; forest.num_sequences as usize];
    for (prediction, &log_prob) in forest.predictions.iter().zip(&scores.log_prob) {
        sums[prediction.sequence as usize] += f64::from(log_prob);
    }
    sums
}

/// First bytes of a file of row scores: format name and version.
const MAGIC: &[u8; 16] = b"tandem-ref-v1\0\0\0";

impl RowScores {
    /// The file for the given content key.
    pub fn path(folder: &Path, key: &str) -> PathBuf {
        folder.join(format!("reference-{key}.bin"))
    }

    /// Reads scores; `None` if the file is absent, incomplete or damaged, in which case they are computed again.
    pub fn read(path: &Path, num_rows: usize) -> Option<Self> {
        let bytes = fs::read(path).ok()?;
        let body = bytes.strip_prefix(MAGIC)?;
        let (body, checksum) = body.split_at_checked(num_rows * 16)?;
        if blake3::hash(body).as_bytes() != checksum {
            return None;
        }
        let number = |b: &[u8]| f64::from_le_bytes(b.try_into().expect("eight bytes"));
        Some(Self(body.chunks_exact(16).map(|row| [number(&row[..8]), number(&row[8..])]).collect()))
    }

    /// Writes scores under a temporary name and renames.
    ///
    /// # Errors
    /// If the file cannot be written; nothing half-written stays behind.
    pub fn write(&self, path: &Path) -> Result<()> {
        let folder = path.parent().expect("a path inside the cache folder");
        let temporary = path.with_extension(format!("{}.tmp", std::process::id()));
        let body: Vec<u8> = self.0.iter().flatten().flat_map(|x| x.to_le_bytes()).collect();
        let write = || {
            fs::create_dir_all(folder)?;
            let mut file = fs::File::create(&temporary)?;
            file.write_all(MAGIC)?;
            file.write_all(&body)?;
            file.write_all(blake3::hash(&body).as_bytes())?;
            file.sync_all()?;
            fs::rename(&temporary, path)
        };
        write().map_err(|source| {
            let _ = fs::remove_file(&temporary);
            TrainError::io("write", path)(source)
        })
    }

    /// Runs the reference over `batches`, this rank's share of all, and files each row's two numbers; what other ranks
    /// of the data group computed is added, and every stage gets what the last one has. `idle_rounds` counts what other ranks compute beyond that, if they need this one for it.
    ///
    /// # Errors
    /// If a forward pass fails, or a rank is lost.
    pub fn compute(
        walk: &StagedWalk<'_>,
        weights: &mut dyn WeightSource,
        cache: &TokenCache,
        group: &mut Group,
        batches: impl Iterator<Item = Result<MicroBatch>>,
        idle_rounds: usize,
        mut progress: impl FnMut(u64),
    ) -> Result<Self> {
        let mut rows = vec![[0.0; 2]; cache.num_rows()];
        let mut scores = HeadScores::default();
        let mut done = 0;
        for batch in batches {
            let batch = batch?;
            walk.forward(weights, &batch.forest, Streams::one(&mut scores), false)?;
            if walk.is_last() {
                let sums = sequence_log_probs(&batch.forest, &scores);
                for (&row, pair) in batch.rows.iter().zip(sums.chunks_exact(2)) {
                    rows[row as usize] = [pair[0], pair[1]];
                }
            }
            // As if all ranks were as far.
            done += (batch.rows.len() * group.size()) as u64;
            progress(done.min(rows.len() as u64));
        }
        for _ in 0..idle_rounds {
            walk.walk.idle_forward(weights)?;
        }
        if group.size() > 1 {
            group.all_reduce(rows.as_flattened_mut(), Reduction::Sum)?;
        }
        if let Some(stages) = walk.stages {
            stages.broadcast_from_last(rows.as_flattened_mut())?;
        }
        Ok(Self(rows))
    }
}

/// The policy as it starts, and the configured reference, ready for the splits that will be scored: loads weights, and reads
/// or computes log-probabilities that are wanted beforehand.
///
/// # Errors
/// If weights cannot be read, a forward pass fails, scores cannot be written, or a rank is lost.
pub fn load(
    config: &Config,
    prepared: &Prepared,
    homes: &Homes,
    mesh: &mut Mesh,
    splits: &[Split],
    observer: &mut dyn Observer,
) -> Result<(Policy, Reference)> {
    let decoder = &mesh.part(&prepared.decoder)?;
    let wanted = &config.reference;
    let precomputes = wanted.kind == ReferenceKind::Precompute;
    let mut pass = Precompute { config, prepared, device: &homes.device, decoder, splits, observer };
    // Another model's weights are gone before the policy's come.
    let mut precomputed = match &wanted.model {
        Some(_) if precomputes => {
            let mut print = Fingerprint::new(decoder);
            let start = Start::of_reference(config, prepared, decoder)?;
            let see: See = &mut |layer, flat| print.see(layer, flat);
            let mut weights =
                start.frozen(config, decoder, homes, mesh.shard(), Kind::Reference, Some(see))?;
            Some(pass.run(mesh, weights.as_mut(), &print, start.frozen_format(config))?)
        }
        _ => None,
    };
    let mut print = Fingerprint::new(decoder);
    let (mut policy, format) = {
        let start = Start::of_policy(config, prepared, decoder)?;
        let shard = mesh.shard();
        let partition = Arc::new(partition(config, decoder, shard.rank(), shard.size()));
        let see: See = &mut |layer, flat| print.see(layer, flat);
        let see = Some(see).filter(|_| precomputes && precomputed.is_none());
        let policy = start.policy(config, decoder, homes, shard, &partition, see)?;
        (policy, start.frozen_format(config))
    };
    if precomputes && precomputed.is_none() {
        precomputed = Some(match prepared.reference_decoder {
            Some(_) => {
                share_base(config, &prepared.decoders(), &homes.device, mesh, &mut policy)?;
                let adapter = policy.reference().expect("just put there").masters();
                let layers = decoder.layers().into_iter().zip(&adapter.layers);
                layers.for_each(|(layer, flat)| print.see(layer, flat.view().as_slice()));
                let scores = pass.run(mesh, &mut SharedReference(&mut policy), &print, format)?;
                policy.share_base(None);
                scores
            }
            None => pass.run(mesh, &mut policy, &print, format)?,
        });
    }
    let reference = match precomputed {
        Some(precomputed) => precomputed,
        None => {
            let start = &|decoder: &Decoder| Start::of_reference(config, prepared, decoder);
            kept(config, &prepared.decoders(), homes, mesh, &mut policy, start)?
        }
    };
    Ok((policy, reference))
}

/// A reference that is kept in memory, or none. `start` tells where weights of its own begin.
///
/// # Errors
/// If weights cannot be read, or memory runs out.
pub fn kept(
    config: &Config,
    decoders: &Decoders,
    homes: &Homes,
    mesh: &mut Mesh,
    policy: &mut Policy,
    start: &dyn Fn(&Decoder) -> Result<Start>,
) -> Result<Reference> {
    let decoder = &mesh.part(&decoders.policy)?;
    Ok(match config.reference.kind {
        ReferenceKind::None | ReferenceKind::Precompute => Reference::None,
        ReferenceKind::Model => Reference::Model(start(decoder)?.frozen(
            config,
            decoder,
            homes,
            mesh.shard(),
            Kind::Reference,
            None,
        )?),
        ReferenceKind::Sync if decoder.adapter().is_none() => {
            let shard = mesh.shard();
            let partition = Arc::new(partition(config, decoder, shard.rank(), shard.size()));
            let start = start(decoder)?;
            let weights = start.trained(config, decoder, homes, shard, &partition, Kind::Reference, None)?;
            Reference::Followed(Box::new(Policy::full(weights)))
        }
        ReferenceKind::Base | ReferenceKind::Adapter | ReferenceKind::Sync => {
            share_base(config, decoders, &homes.device, mesh, policy)?;
            Reference::Shared
        }
    })
}

/// Lets the reference share the policy's base: with the adapter that the config gives it, or with none.
fn share_base(
    config: &Config,
    decoders: &Decoders,
    device: &Device,
    mesh: &mut Mesh,
    policy: &mut Policy,
) -> Result<()> {
    if config.reference.kind == ReferenceKind::Base {
        policy.share_base(None);
        return Ok(());
    }
    let own = decoders.reference.as_ref().unwrap_or(&decoders.policy);
    let decoder = mesh.part(own)?;
    let masters = match &config.reference.adapter {
        Some(folder) => {
            let folder = Some(folder.as_path()).filter(|_| !device.is_meta());
            adapter_masters(config, &decoder, device, Kind::Reference, folder, policy)?
        }
        // A copy of what the policy starts from.
        None => {
            let mut layers = Vec::new();
            for master in &policy.masters().0.layers {
                let mut copy = device.alloc(Kind::Reference, 1, master.cols(), DType::F32)?;
                ops::cast(device, master.view(), copy.view_mut())?;
                layers.push(copy);
            }
            FlatWeights { layers }
        }
    };
    let copy = ReplicatedWeights::new(device, decoder, masters, compute_type(config))?;
    match config.reference.kind {
        ReferenceKind::Sync => policy.lead(copy),
        _ => policy.share_base(Some(copy)),
    }
    Ok(())
}

/// Hashes of what weights were loaded.
struct Fingerprint<'a> {
    decoder: &'a Decoder,
    /// By layer that this rank owns, of its weights and those of adapters.
    layers: BTreeMap<LayerId, blake3::Hasher>,
}

impl<'a> Fingerprint<'a> {
    fn new(decoder: &'a Decoder) -> Self {
        Self { decoder, layers: BTreeMap::new() }
    }

    fn see(&mut self, layer: LayerId, weights: &[f32]) {
        if self.decoder.owns(layer) {
            self.layers.entry(layer).or_default().update(bytemuck::cast_slice(weights));
        }
    }

    fn layers(&self) -> Vec<blake3::Hash> {
        self.layers.values().map(blake3::Hasher::finalize).collect()
    }
}

/// The pass that computes the reference's log-probabilities once.
struct Precompute<'a> {
    config: &'a Config,
    prepared: &'a Prepared,
    device: &'a Device,
    decoder: &'a Decoder,
    splits: &'a [Split],
    observer: &'a mut dyn Observer,
}

impl Precompute<'_> {
    fn run(
        &mut self,
        mesh: &mut Mesh,
        weights: &mut dyn WeightSource,
        print: &Fingerprint,
        format: Format,
    ) -> Result<Reference> {
        // A model in slices has a fingerprint of its own: its arithmetic differs.
        let fingerprint = mesh.whole_fingerprint(self.decoder, &print.layers())?;
        let mut scores = |split: Split| match self.prepared.tokens(split) {
            Some(cache) if self.splits.contains(&split) => {
                let mut key = blake3::Hasher::new();
                key.update(fingerprint.as_bytes());
                key.update(format.name().as_bytes());
                key.update(cache.content_hash().as_bytes());
                key.update(compute_type(self.config).name().as_bytes());
                self.of_split(mesh, weights, split, cache, &key.finalize()).map(Some)
            }
            _ => Ok(None),
        };
        Ok(Reference::Precomputed { train: scores(Split::Train)?, eval: scores(Split::Eval)? })
    }

    fn of_split(
        &mut self,
        mesh: &mut Mesh,
        weights: &mut dyn WeightSource,
        split: Split,
        cache: &TokenCache,
        key: &blake3::Hash,
    ) -> Result<RowScores> {
        let Self { config, prepared, device, decoder, observer, .. } = self;
        let path = RowScores::path(&cache_folder(config), &key.to_hex()[..32]);
        // The first rank looks, for the others may not see its disk.
        let world = mesh.world();
        let mut found = if world.rank() == 0 { RowScores::read(&path, cache.num_rows()) } else { None };
        let mut is_there = [u8::from(found.is_some())];
        world.broadcast(&mut is_there, 0)?;
        if is_there == [1] {
            let scores = found.get_or_insert_with(|| RowScores(vec![[0.0; 2]; cache.num_rows()]));
            world.broadcast(scores.0.as_flattened_mut(), 0)?;
            return Ok(found.expect("just put there"));
        }
        let (data, split_over, stages) = mesh.in_walk();
        let walk = StagedWalk { walk: to_walk(config, decoder, device, split_over), stages };
        let mut batcher = prepared.batcher(config);
        let rows: Vec<u32> = (0..cache.num_rows() as u32).collect();
        let share = batcher.share(cache, &rows, data.rank(), data.size());
        let batches = share.mine.iter().map(|&index| batcher.build(cache, share.rows_of(index)));
        let total = cache.num_rows() as u64;
        let progress = |done| observer.event(&Event::Reference { split, done, total });
        let is_sharded = config.compute.sharding == Sharding::Zero3;
        let idle = if is_sharded { share.rounds - share.mine.len() } else { 0 };
        let scores = RowScores::compute(&walk, weights, cache, data, batches, idle, progress)?;
        if mesh.world().rank() == 0 {
            scores.write(&path)?;
        }
        Ok(scores)
    }
}
