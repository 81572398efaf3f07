//! A run's state as named tensors: into a checkpoint and back.
//!
//! Names are logical parameters (`policy/block.3.qkv_weight`, `second_moment/head.head_weight`), so
//! checkpoints do not depend on the writer's placement.
//!
//! Sharded tensors: each rank writes its shard, as [`Partition`] divides layers. Replicated
//! tensors: divided in the same way among the replicas. A tensor that every tensor-parallel rank
//! holds is written by rank 0 of the group; a tied embedding by the first pipeline stage. So
//! nothing is written twice, the ranks of a stage write equally much, and the files of a number of
//! ranks are the same under every sharding.

use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

use tandem_kernels::{
    AdamMoment, Device, MemoryKind, StateForm, States, StatesView, StochasticRounding, ops,
};
use tandem_model::adapter::save_adapter;
use tandem_model::{Decoder, FlatWeights, LayerId, ModelError, ParamSpec, Result as ModelResult};

use crate::checkpoint::state::{CheckpointState, MasterWeights};
use crate::checkpoint::{Checkpoint, TensorShard, TensorSpec};
use crate::config::ComputeConfig;
use crate::inputs::RunInputs;
use crate::optimizer::adafactor::{MomentTensor, moment_tensors};
use crate::optimizer::average::{AVERAGE, way_to_average};
use crate::optimizer::{
    BASE_SEQUENCE, EvaluationWeights, Has, Optimizer, StateGroup, every, first_element, from,
};
use crate::parallel::{DeviceMesh, Partition};
use crate::weights::Policy;
use crate::{Result, TrainError};

/// The name of the masters' group.
const POLICY: &str = "policy";

/// And of a reference's that follows the policy.
const REFERENCE: &str = "reference";

/// A whole layer's masters, on the first rank; the others [`participate_in_gathers`].
pub(crate) fn read_whole(
    mesh: &DeviceMesh,
    decoder: &Decoder,
    policy: &mut Policy,
    layer: LayerId,
) -> Result<Vec<f32>> {
    match mesh.stages().filter(|_| !decoder.owns(layer)) {
        Some(stages) => {
            let mut flat = vec![0.0; decoder.whole().trained(layer).len];
            stages.ask(decoder.owner(layer), &mut flat)?;
            Ok(flat)
        }
        None => join(mesh, decoder, policy, layer),
    }
}

/// Takes this rank's part in the first one's reading of every layer, in their order.
pub(crate) fn participate_in_gathers(
    mesh: &DeviceMesh,
    decoder: &Decoder,
    policy: &mut Policy,
) -> Result<()> {
    // A layer without trainable parameters is skipped.
    let is_asked = |layer: &LayerId| decoder.owns(*layer) && decoder.trained(*layer).len > 0;
    for layer in decoder.layers().into_iter().filter(is_asked) {
        if !mesh.sends_to_rank_zero() {
            policy.participate_in_gather(decoder.index(layer))?;
            continue;
        }
        let flat = join(mesh, decoder, policy, layer)?;
        if let Some(stages) = mesh.stages().filter(|_| mesh.slice().index == 0 && !mesh.stage().is_first()) {
            stages.answer(&flat)?;
        }
    }
    Ok(())
}

/// Writes the adapter that trains as a folder that the peft library loads, on the first rank; the
/// others [`participate_in_gathers`].
pub(crate) fn write_adapter(
    folder: &Path,
    prepared: &RunInputs,
    mesh: &DeviceMesh,
    part: &Decoder,
    policy: &mut Policy,
) -> Result<()> {
    let RunInputs { folder: base, decoder, .. } = prepared;
    save_adapter(folder, base, decoder, &mut |layer, flat| copy_whole(mesh, part, policy, layer, flat))?;
    Ok(())
}

/// [`read_whole`] into the buffer of a model writer.
pub(crate) fn copy_whole(
    mesh: &DeviceMesh,
    part: &Decoder,
    policy: &mut Policy,
    layer: LayerId,
    flat: &mut [f32],
) -> ModelResult<()> {
    let read = read_whole(mesh, part, policy, layer);
    flat.copy_from_slice(&read.map_err(|error| ModelError::Store(Box::new(error)))?);
    Ok(())
}

/// A whole layer of this stage, of all of its parts and slices.
fn join(mesh: &DeviceMesh, decoder: &Decoder, policy: &mut Policy, layer: LayerId) -> Result<Vec<f32>> {
    let mut flat = vec![0.0; decoder.trained(layer).len];
    policy.read_layer(decoder.index(layer), &mut flat)?;
    mesh.join(decoder, layer, &mut flat)?;
    Ok(flat)
}

/// A rank's shard of a checkpoint.
#[derive(Clone)]
pub struct CheckpointShard {
    decoder: Arc<Decoder>,
    /// Element range per layer that this rank writes; empty for a copy of another stage's tensor.
    written: Vec<Range<usize>>,
    /// Whether it writes what all replicas hold whole.
    is_first: bool,
}

impl CheckpointShard {
    /// Creates the shard of one of several replicas ([`DeviceMesh::share`]): a part of what it holds.
    pub fn new(decoder: &Arc<Decoder>, compute: &ComputeConfig, share: (usize, usize)) -> Self {
        let partition = Partition::among(compute, decoder, share, share.1);
        let written = |(index, layer): (usize, LayerId)| {
            let owned = partition.owned(index);
            if decoder.owns(layer) { owned } else { owned.start..owned.start }
        };
        let written = decoder.layers().into_iter().enumerate().map(written).collect();
        Self { decoder: decoder.clone(), written, is_first: share.0 == 0 }
    }

    /// Pieces of a run's state in place, to be written before training continues.
    pub fn all_pieces<'a>(&self, state: CheckpointState<'a>) -> Vec<TensorShard<'a>> {
        let groups = self.parts(state);
        let pieces = groups.iter().flat_map(|Group { name, parts, has, .. }| self.pieces(name, parts, *has));
        pieces.chain(self.moments(state.optimizer).into_iter().flat_map(moment_pieces)).collect()
    }

    /// Moments of layers that this rank writes, of those that all replicas hold.
    fn moments<'a>(&self, optimizer: &'a Optimizer) -> Vec<Moments<'a>> {
        let layers = optimizer.factored().filter(|_| self.is_first).into_iter().flat_map(|all| &all.layers);
        let owned = layers.filter(|moments| self.decoder.owns(moments.layer));
        owned.map(|moments| (moments.layer, &moments.tensors[..], moments.values.view())).collect()
    }

    /// Part to write, by group and layer.
    fn parts<'a>(&self, state: CheckpointState<'a>) -> Vec<Group<'a>> {
        let CheckpointState { policy, optimizer, follower } = state;
        let of_masters = |name, MasterWeights { weights, partition, home }: MasterWeights<'a>| {
            let layers = weights.layers.iter().map(|flat| flat.view().into()).collect();
            (name, layers, every as Has, partition, home)
        };
        let follower = follower.map(|masters| of_masters(REFERENCE, masters));
        let views = |states: &'a [States]| states.iter().map(States::view).collect();
        let (partition, home) = (optimizer.partition(), optimizer.home());
        let states = optimizer.states().into_iter();
        let states =
            states.map(|StateGroup { name, layers, has }| (name, views(layers), has, partition, home));
        let groups = std::iter::once(of_masters(POLICY, policy)).chain(states).chain(follower);
        let parts = |layers: Parts<'a>, held: &Partition, has: Has| {
            let written = self.written(has);
            let part = |(index, flat): (usize, StatesView<'a>)| {
                let first = self.first_element(index, has);
                let (start, owned) = (from(&held.owned(index), first).start, &written[index]);
                flat.range(owned.start - start..owned.end - start)
            };
            layers.into_iter().enumerate().map(part).collect()
        };
        let group =
            |(name, layers, has, held, home)| Group { name, parts: parts(layers, held, has), has, home };
        groups.map(group).collect()
    }

    /// First element of a layer that a state is kept of.
    fn first_element(&self, index: usize, has: Has) -> usize {
        let layer = self.decoder.layers()[index];
        first_element(self.decoder.trained(layer), layer, has)
    }

    /// Elements per layer that this rank writes of a state.
    fn written(&self, has: Has) -> Vec<Range<usize>> {
        let written = self.written.iter().enumerate();
        written.map(|(index, owned)| from(owned, self.first_element(index, has))).collect()
    }

    /// The parts of the layers of one group, by tensor.
    fn pieces<'a>(&self, group: &str, parts: &[StatesView<'a>], has: Has) -> Vec<TensorShard<'a>> {
        let (decoder, slice) = (&self.decoder, self.decoder.slice());
        let mut pieces = Vec::new();
        for ((layer, owned), part) in decoder.layers().into_iter().zip(self.written(has)).zip(parts) {
            let params = decoder.whole().trained(layer).params.iter().zip(&decoder.trained(layer).params);
            for (whole, param) in params {
                if !has(layer, whole.part) || (slice.index > 0 && !slice.splits(whole.part)) {
                    continue;
                }
                let mut add = |columns: Range<usize>, place: Range<usize>, first: usize| {
                    let (start, end) = (place.start.max(owned.start), place.end.min(owned.end));
                    if start < end {
                        let data = part.range(start - owned.start..end - owned.start);
                        let tensor = spec(group, layer, whole);
                        pieces.push(TensorShard {
                            tensor,
                            columns,
                            start: first + start - place.start,
                            data,
                        });
                    }
                };
                let columns = decoder.columns(whole);
                if columns.len() < whole.cols {
                    add(columns, param.range(), 0);
                    continue;
                }
                for run in decoder.runs(whole) {
                    let start = param.offset + run.start;
                    add(columns.clone(), start..start + run.whole.len(), run.whole.start);
                }
            }
        }
        pieces
    }
}

/// Moments of a layer: their tensors, and the elements of all.
type Moments<'a> = (LayerId, &'a [MomentTensor], StatesView<'a>);

/// The tensors of a layer's moments, to be written.
fn moment_pieces((layer, tensors, values): Moments<'_>) -> impl Iterator<Item = TensorShard<'_>> {
    tensors.iter().map(move |tensor| {
        let spec = moment_spec(layer, tensor);
        let data = values.range(tensor.range.clone());
        TensorShard { columns: 0..spec.columns(), tensor: spec, start: 0, data }
    })
}

fn moment_spec(layer: LayerId, tensor: &MomentTensor) -> TensorSpec {
    TensorSpec { name: name(tensor.group, layer, tensor.part.name()), shape: tensor.shape.clone() }
}

/// Held elements per layer.
type Parts<'a> = Vec<StatesView<'a>>;

/// Written tensors of the masters or of one optimizer state.
struct Group<'a> {
    name: &'static str,
    /// Per layer.
    parts: Parts<'a>,
    /// Parameters that have a tensor in it.
    has: Has,
    /// Device of the buffers.
    home: &'a Device,
}

/// Copy buffer of a rank's shard, refilled for each checkpoint so that training can continue.
pub struct Snapshot {
    share: CheckpointShard,
    groups: Vec<(&'static str, Has, Vec<States>)>,
    /// Moments that all replicas hold whole, on the rank that writes them.
    moments: Vec<(LayerId, Vec<MomentTensor>, States)>,
}

impl Snapshot {
    /// Allocates a copy buffer; `follows` includes an EMA reference.
    pub fn new(
        device: &Device,
        share: CheckpointShard,
        optimizer: &Optimizer,
        follows: bool,
    ) -> Result<Self> {
        let lengths = |has| share.written(has).into_iter().map(|owned| owned.len());
        // Masters are f32, which has no moments.
        let master =
            |len| States::zeros(device, MemoryKind::Checkpoint, AdamMoment::First, StateForm::F32, len);
        let masters = |name| -> Result<_> {
            Ok((name, every as Has, lengths(every).map(master).collect::<Result<_, _>>()?))
        };
        let mut groups = vec![masters(POLICY)?];
        for StateGroup { name, layers, has } in optimizer.states() {
            let copy =
                |(states, len): (&States, usize)| states.zeros_like(device, MemoryKind::Checkpoint, len);
            groups.push((name, has, layers.iter().zip(lengths(has)).map(copy).collect::<Result<_, _>>()?));
        }
        if follows {
            groups.push(masters(REFERENCE)?);
        }
        let copy = |(layer, tensors, values): Moments<'_>| -> Result<_> {
            Ok((layer, tensors.to_vec(), master(values.len())?))
        };
        let moments = share.moments(optimizer).into_iter().map(copy).collect::<Result<_>>()?;
        Ok(Self { share, groups, moments })
    }

    /// Copies the state of a run.
    ///
    /// # Errors
    /// The state is of another run.
    pub fn fill(&mut self, device: &Device, state: CheckpointState<'_>) -> Result<()> {
        // The CPU copies state in a file to memory that a GPU may have written.
        device.synchronize()?;
        for ((_, _, copies), Group { parts, home, .. }) in self.groups.iter_mut().zip(self.share.parts(state))
        {
            for (copy, part) in copies.iter_mut().zip(parts) {
                let all = 0..copy.len();
                ops::copy_states(home, part, copy.range_mut(all, StochasticRounding::default()))?;
            }
        }
        let home = state.optimizer.home();
        for ((_, _, copy), (_, _, values)) in self.moments.iter_mut().zip(self.share.moments(state.optimizer))
        {
            let all = 0..copy.len();
            ops::copy_states(home, values, copy.range_mut(all, StochasticRounding::default()))?;
        }
        // Another thread reads it next.
        Ok(device.synchronize()?)
    }

    /// Pieces to write.
    pub fn pieces(&self) -> Vec<TensorShard<'_>> {
        let mut pieces = Vec::new();
        for (name, has, copies) in &self.groups {
            let views: Parts<'_> = copies.iter().map(States::view).collect();
            pieces.append(&mut self.share.pieces(name, &views, *has));
        }
        for (layer, tensors, copy) in &self.moments {
            pieces.extend(moment_pieces((*layer, tensors, copy.view())));
        }
        pieces
    }
}

/// Reads masters and optimiser states back; the caller refreshes the compute copies.
pub(crate) fn restore(
    checkpoint: &Checkpoint,
    data_hash: &str,
    decoder: &Decoder,
    policy: &mut Policy,
    optimizer: &mut Optimizer,
    follower: Option<&mut Policy>,
) -> Result<()> {
    if checkpoint.cursor().data_hash != data_hash {
        return Err(TrainError::BrokenCheckpoint {
            path: checkpoint.path().to_path_buf(),
            reason: "the training data (or its tokenizer, template or max_length) has changed since the run started; \
                     restore it, or start anew with --overwrite"
                .to_owned(),
        });
    }
    let mut num_known = restore_weights(checkpoint, EvaluationWeights::Trained, decoder, policy, follower)?;
    let (partition, home) = (optimizer.partition().clone(), optimizer.home().clone());
    for (group, states, has) in optimizer.states_mut() {
        num_known += read_states(checkpoint, group, decoder, &home, states, &partition, has)?;
    }
    num_known += read_moments(checkpoint, decoder, optimizer)?;
    let num_stored = checkpoint.tensors().len();
    if num_known != num_stored {
        return Err(TrainError::BrokenCheckpoint {
            path: checkpoint.path().to_path_buf(),
            reason: format!(
                "it holds {num_stored} tensors, but this run knows only {num_known} of them: model or optimizer has \
                 changed; restore them in the config, or start anew with --overwrite"
            ),
        });
    }
    Ok(())
}

/// Reads the masters of the policy, and of a reference that follows it, and returns the number of
/// their tensors; the caller refreshes the compute copies. A follower that shares the policy's base
/// is in the policy.
pub(crate) fn restore_weights(
    checkpoint: &Checkpoint,
    weights: EvaluationWeights,
    decoder: &Decoder,
    policy: &mut Policy,
    follower: Option<&mut Policy>,
) -> Result<usize> {
    let (partition, home) = (policy.masters().1.clone(), policy.home().clone());
    let masters = policy.masters_mut();
    let mut num_known = read_masters(checkpoint, POLICY, weights, decoder, &home, masters, &partition)?;
    let (partition, home, masters) = if let Some(follower) = follower {
        (follower.masters().1.clone(), follower.home().clone(), follower.masters_mut())
    } else if let Some(follower) = policy.follower_mut() {
        (follower.partition().clone(), follower.device().clone(), follower.masters_mut())
    } else {
        return Ok(num_known);
    };
    let weights = EvaluationWeights::Trained;
    num_known += read_masters(checkpoint, REFERENCE, weights, decoder, &home, masters, &partition)?;
    Ok(num_known)
}

/// Checks that the checkpoint has a policy of this model.
pub(super) fn check_policy(
    checkpoint: &Checkpoint,
    weights: EvaluationWeights,
    decoder: &Decoder,
) -> Result<()> {
    check_policy_group(checkpoint, POLICY, weights, decoder).map(drop)
}

/// Reads the trained parameters of a whole layer of the policy.
pub(super) fn read_policy(
    checkpoint: &Checkpoint,
    weights: EvaluationWeights,
    decoder: &Decoder,
    layer: LayerId,
    flat: &mut [f32],
) -> Result<()> {
    read_evaluated(checkpoint, POLICY, weights, decoder, layer, 0..flat.len(), flat)
}

/// Checks that all is there of which these weights of a group are made, and returns the number of the
/// group's tensors.
fn check_policy_group(
    checkpoint: &Checkpoint,
    group: &str,
    weights: EvaluationWeights,
    decoder: &Decoder,
) -> Result<usize> {
    match weights {
        EvaluationWeights::Trained => check_group(checkpoint, group, decoder),
        EvaluationWeights::Average => check_group(checkpoint, AVERAGE, decoder),
        EvaluationWeights::ScheduleFree { .. } => {
            check_group(checkpoint, BASE_SEQUENCE, decoder)?;
            check_group(checkpoint, group, decoder)
        }
    }
}

/// Reads elements `owned` of a layer of these weights of a group.
fn read_evaluated(
    checkpoint: &Checkpoint,
    group: &str,
    weights: EvaluationWeights,
    decoder: &Decoder,
    layer: LayerId,
    owned: Range<usize>,
    out: &mut [f32],
) -> Result<()> {
    match weights {
        EvaluationWeights::Trained => read_layer(checkpoint, group, decoder, layer, owned, out),
        EvaluationWeights::Average => read_layer(checkpoint, AVERAGE, decoder, layer, owned, out),
        EvaluationWeights::ScheduleFree { beta1 } => {
            read_layer(checkpoint, group, decoder, layer, owned.clone(), out)?;
            let mut room = Vec::new();
            for (start, out) in owned.clone().step_by(CHUNK).zip(out.chunks_mut(CHUNK)) {
                // Padding has no number in the file: it stays as it is.
                room.clear();
                room.extend_from_slice(out);
                read_layer(checkpoint, BASE_SEQUENCE, decoder, layer, start..start + out.len(), &mut room)?;
                for (x, base) in out.iter_mut().zip(&room) {
                    *x = ops::lerp_of(*x, *base, way_to_average(beta1));
                }
            }
            Ok(())
        }
    }
}

/// Reads this rank's part of the masters that it holds, and returns the number of tensors that all
/// ranks hold.
fn read_masters(
    checkpoint: &Checkpoint,
    group: &str,
    weights: EvaluationWeights,
    decoder: &Decoder,
    device: &Device,
    masters: &mut FlatWeights,
    partition: &Partition,
) -> Result<usize> {
    let num_tensors = check_policy_group(checkpoint, group, weights, decoder)?;
    for (index, (layer, flat)) in decoder.layers().into_iter().zip(&mut masters.layers).enumerate() {
        let owned = partition.owned(index);
        let read = |flat: &mut [f32]| read_evaluated(checkpoint, group, weights, decoder, layer, owned, flat);
        device.host_update(flat.view_mut(), read)?.transpose()?;
    }
    Ok(num_tensors)
}

/// Elements of states that are f32 at once while they are read.
const CHUNK: usize = 1 << 18;

/// The same for optimizer states, converted to this run's state format.
fn read_states(
    checkpoint: &Checkpoint,
    group: &str,
    decoder: &Decoder,
    device: &Device,
    states: &mut [States],
    partition: &Partition,
    has: Has,
) -> Result<usize> {
    let num_tensors = check_having(checkpoint, group, decoder, has)?;
    let mut room = Vec::new();
    for (index, (layer, states)) in decoder.layers().into_iter().zip(states).enumerate() {
        let owned = from(&partition.owned(index), first_element(decoder.trained(layer), layer, has));
        for start in owned.clone().step_by(CHUNK) {
            let chunk = start..owned.end.min(start + CHUNK);
            room.clear();
            room.resize(chunk.len(), 0.0);
            read_layer(checkpoint, group, decoder, layer, chunk, &mut room)?;
            device.write_states(&room, states, start - owned.start)?;
        }
    }
    Ok(num_tensors)
}

/// Reads the moments that every rank holds whole, and returns the number of tensors of all layers.
fn read_moments(checkpoint: &Checkpoint, decoder: &Decoder, optimizer: &mut Optimizer) -> Result<usize> {
    let home = optimizer.home().clone();
    let Some(moments) = optimizer.factored_mut() else { return Ok(0) };
    let mut num_tensors = 0;
    for layer in decoder.whole().layers() {
        for tensor in moment_tensors(decoder.whole(), layer) {
            checkpoint.check_tensor(&moment_spec(layer, &tensor))?;
            num_tensors += 1;
        }
    }
    for moments in &mut moments.layers {
        let mut values = vec![0.0; moments.values.len()];
        for tensor in &moments.tensors {
            let out = &mut values[tensor.range.clone()];
            checkpoint.read(&moment_spec(moments.layer, tensor).name, 0, out)?;
        }
        home.write_states(&values, &mut moments.values, 0)?;
    }
    Ok(num_tensors)
}

/// Checks that all of a group is there, the other ranks' too, and returns the number of its
/// tensors.
fn check_group(checkpoint: &Checkpoint, group: &str, decoder: &Decoder) -> Result<usize> {
    check_having(checkpoint, group, decoder, every)
}

/// The same of a group that some parameters have.
fn check_having(checkpoint: &Checkpoint, group: &str, decoder: &Decoder, has: Has) -> Result<usize> {
    let mut num_tensors = 0;
    for layer in decoder.whole().layers() {
        for param in decoder.whole().trained(layer).params.iter().filter(|param| has(layer, param.part)) {
            checkpoint.check_tensor(&spec(group, layer, param))?;
            num_tensors += 1;
        }
    }
    Ok(num_tensors)
}

/// Reads elements `owned` of a layer of this rank's slice. Padding stays as it is.
fn read_layer(
    checkpoint: &Checkpoint,
    group: &str,
    decoder: &Decoder,
    layer: LayerId,
    owned: Range<usize>,
    out: &mut [f32],
) -> Result<()> {
    let params = decoder.whole().trained(layer).params.iter().zip(&decoder.trained(layer).params);
    let is_owned = |param: &ParamSpec| param.offset < owned.end && owned.start < param.range().end;
    for (whole, param) in params.filter(|(_, param)| is_owned(param)) {
        let spec = spec(group, layer, whole);
        for run in decoder.runs(whole) {
            let start = param.offset + run.start;
            let wanted = start.max(owned.start)..(start + run.whole.len()).min(owned.end);
            if !wanted.is_empty() {
                let out = &mut out[wanted.start - owned.start..wanted.end - owned.start];
                checkpoint.read(&spec.name, run.whole.start + wanted.start - start, out)?;
            }
        }
    }
    Ok(())
}

fn spec(group: &str, layer: LayerId, param: &ParamSpec) -> TensorSpec {
    TensorSpec { name: name(group, layer, param.part.name()), shape: vec![param.rows, param.cols] }
}

fn name(group: &str, layer: LayerId, part: &str) -> String {
    match layer {
        LayerId::Embedding => format!("{group}/embedding.{part}"),
        LayerId::Block(index) => format!("{group}/block.{index}.{part}"),
        LayerId::Head => format!("{group}/head.{part}"),
    }
}
