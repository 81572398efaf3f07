//! The ranks as a grid, replicate × shard × pipeline × tensor.
//!
//! Neighbours form a *tensor group*: they hold the slices of one stage of a model. Neighbouring
//! tensor groups hold the stages of one model, front to back; the ranks of one slice of them are a
//! *pipeline group*. All of these compute the same micro-batches together. The ranks that hold the
//! same slice of the same stage form a *data group*: they divide micro-batches. With sharding,
//! neighbours in it form a *shard group*, which holds the slice once, in parts; the ranks of all
//! shard groups that hold the same part are its *replicas*. Without a tensor or pipeline axis all
//! ranks are one data group, and without a replicate axis a data group is one shard group.

use std::sync::Arc;

use tandem_comm::{ProcessGroup, Reduction};
use tandem_kernels::SquareSum;
use tandem_model::{
    Decoder, LayerExecutor, LayerId, ModelFolder, PipelineOps, PipelineStage, TensorParallelOps,
    TensorParallelShard,
};

use crate::config::{ComputeConfig, Config};
use crate::parallel::PipelineGroup;
use crate::parallel::tensor_group::TensorGroup;
use crate::{Result, TrainError, recipe};

/// All ranks, and this one's groups among them.
pub struct DeviceMesh {
    world: ProcessGroup,
    axes: Option<Axes>,
    hybrid: Option<Hybrid>,
}

struct Axes {
    data: ProcessGroup,
    /// If there is more than one slice.
    tensor: Option<TensorGroup>,
    /// If there is more than one stage.
    stages: Option<PipelineGroup>,
}

impl Axes {
    fn join<'a>(&'a self, executor: LayerExecutor<'a>) -> LayerExecutor<'a> {
        LayerExecutor {
            split: self.tensor.as_ref().map(|tensor| tensor as &dyn TensorParallelOps),
            stages: self.stages.as_ref().map(|stages| stages as &dyn PipelineOps),
            ..executor
        }
    }
}

/// How a data group is divided.
struct Hybrid {
    /// Its ranks that hold the slice together.
    shard: ProcessGroup,
    /// Its ranks that hold the same part.
    replicas: ProcessGroup,
}

impl DeviceMesh {
    /// Divides the ranks as `compute` says: `tensor` neighbours hold the slices of a stage,
    /// `pipeline` times as many a model, and there are `replicate` times as many models in parts.
    ///
    /// # Errors
    /// If their number cannot be divided so, or a rank is lost.
    pub fn new(mut world: ProcessGroup, compute: &ComputeConfig) -> Result<Self> {
        check_ranks(compute, world.size())?;
        let ComputeConfig { tensor: slices, pipeline: stages, replicate, .. } = *compute;
        let of_model = slices * stages;
        let axes = if of_model == 1 {
            None
        } else {
            let data = world.split_by(|rank| rank % of_model)?;
            let wire = compute.walk_wire();
            let tensor = if slices > 1 { Some(TensorGroup::new(&mut world, slices, wire)?) } else { None };
            let pipeline = |rank: usize| rank / of_model * slices + rank % slices;
            let stages =
                if stages > 1 { Some(PipelineGroup::new(world.split_by(pipeline)?, wire)?) } else { None };
            Some(Axes { data, tensor, stages })
        };
        let mut mesh = Self { world, axes, hybrid: None };
        if replicate > 1 {
            let data = mesh.data();
            let shards = data.size() / replicate;
            let shard = data.split_by(|rank| rank / shards)?;
            let replicas = data.split_by(|rank| rank % shards)?;
            mesh.hybrid = Some(Hybrid { shard, replicas });
        }
        Ok(mesh)
    }

    /// The same ranks once more, for calls that go on beside those of this mesh. All of them call
    /// this.
    pub fn duplicate_groups(&mut self, compute: &ComputeConfig) -> Result<Self> {
        Self::new(self.world.split(0)?, compute)
    }

    /// One rank.
    pub fn alone() -> Self {
        Self { world: ProcessGroup::alone(), axes: None, hybrid: None }
    }

    /// All ranks.
    pub fn world(&mut self) -> &mut ProcessGroup {
        &mut self.world
    }

    /// The ranks that hold the same slice of the same stage as this one.
    pub fn data(&mut self) -> &mut ProcessGroup {
        self.forward_groups().0
    }

    /// The ranks among which this rank's slice is divided: all that hold it, or some.
    pub fn shard(&mut self) -> &mut ProcessGroup {
        self.reduction_groups().0
    }

    /// The ranks among which this rank's slice is divided, and, if they are not all that hold it,
    /// those of the others that hold the same part: a sum over the data group is one over the
    /// first, then one over the second.
    pub fn reduction_groups(&mut self) -> (&mut ProcessGroup, Option<&mut ProcessGroup>) {
        match (&mut self.hybrid, &mut self.axes) {
            (Some(Hybrid { shard, replicas }), _) => (shard, Some(replicas)),
            (None, Some(Axes { data, .. })) => (data, None),
            (None, None) => (&mut self.world, None),
        }
    }

    /// The groups of [`DeviceMesh::reduction_groups`] once more, for sums that go on beside other calls.
    pub fn duplicate_reduction_groups(&mut self) -> Result<(ProcessGroup, Option<ProcessGroup>)> {
        let (shard, replicas) = self.reduction_groups();
        let shard = if shard.size() > 1 { shard.split(0)? } else { ProcessGroup::alone() };
        Ok((shard, replicas.map(|replicas| replicas.split(0)).transpose()?))
    }

    /// Which share of the slice this rank answers for where each rank of the data group has one of
    /// its own, and how many there are: shares of its part.
    pub fn share(&mut self) -> (usize, usize) {
        match &self.hybrid {
            Some(Hybrid { shard, replicas }) => {
                (shard.rank() * replicas.size() + replicas.rank(), shard.size() * replicas.size())
            }
            None => (self.data().rank(), self.data().size()),
        }
    }

    /// The ranks that hold the same, those that hold the other slices, and those that hold the
    /// other stages: who meets in a walk.
    pub fn forward_groups(
        &mut self,
    ) -> (&mut ProcessGroup, Option<&dyn TensorParallelOps>, Option<&PipelineGroup>) {
        match &mut self.axes {
            Some(Axes { data, tensor, stages }) => {
                (data, tensor.as_ref().map(|tensor| tensor as &dyn TensorParallelOps), stages.as_ref())
            }
            None => (&mut self.world, None, None),
        }
    }

    /// All ranks, and an executor with the ranks that hold the other slices and stages of its model: the
    /// groups of generation.
    pub fn world_in_walk<'a>(
        &'a mut self,
        executor: LayerExecutor<'a>,
    ) -> (&'a mut ProcessGroup, LayerExecutor<'a>) {
        let Self { world, axes, .. } = self;
        (world, axes.as_ref().map_or(executor, |axes| axes.join(executor)))
    }

    /// An executor with the ranks that hold the other slices and stages of its model, for generation.
    pub fn join_generation<'a>(&'a self, executor: LayerExecutor<'a>) -> LayerExecutor<'a> {
        self.axes.as_ref().map_or(executor, |axes| axes.join(executor))
    }

    fn tensor(&self) -> Option<&TensorGroup> {
        self.axes.as_ref()?.tensor.as_ref()
    }

    /// Ranks that hold the other slices of this rank's stage.
    pub fn split(&self) -> Option<&dyn TensorParallelOps> {
        self.tensor().map(|tensor| tensor as &dyn TensorParallelOps)
    }

    /// Ranks that hold the other stages of this rank's model.
    pub fn stages(&self) -> Option<&PipelineGroup> {
        self.axes.as_ref()?.stages.as_ref()
    }

    /// Which slice this rank holds.
    pub fn slice(&self) -> TensorParallelShard {
        self.tensor().map_or(TensorParallelShard::WHOLE, TensorGroup::shard)
    }

    /// Which stage this rank holds.
    pub fn stage(&self) -> PipelineStage {
        self.stages().map_or(PipelineStage::WHOLE, PipelineGroup::own)
    }

    /// This rank's part of a decoder.
    ///
    /// # Errors
    /// If it cannot be divided into so many slices and stages.
    pub fn part(&self, whole: &Arc<Decoder>) -> Result<Arc<Decoder>> {
        Ok(Decoder::staged(&Decoder::sliced(whole, self.slice())?, self.stage())?)
    }

    /// Whether this rank speaks for those that compute a micro-batch together: its stage has the
    /// scores, which all of its slices know.
    pub fn is_reporting_rank(&self) -> bool {
        self.slice().index == 0 && self.stage().is_last()
    }

    /// Sums squares over the ranks that hold parts of a model: those of a shard group if that is
    /// divided, the stages, and the slices.
    pub fn sum_squares(&mut self, own: SquareSum, is_divided: bool) -> Result<SquareSum> {
        let (mut integers, mut large) = (own.to_integers(), [own.large()]);
        if is_divided {
            let shard = self.shard();
            shard.all_reduce(&mut integers, Reduction::Sum)?;
            shard.all_reduce(&mut large, Reduction::Sum)?;
        }
        if let Some(stages) = self.stages() {
            stages.all_reduce(&mut integers)?;
            stages.all_reduce(&mut large)?;
        }
        if let Some(tensor) = self.tensor() {
            tensor.all_reduce(&mut integers)?;
            tensor.all_reduce(&mut large)?;
        }
        Ok(SquareSum::from_integers(integers, large[0]))
    }

    /// The fingerprint of a whole model from those of the layers that this rank owns: the same for
    /// any number of stages.
    pub fn whole_fingerprint(&self, decoder: &Decoder, own: &[blake3::Hash]) -> Result<blake3::Hash> {
        const EACH: usize = blake3::OUT_LEN;
        let mut layers: Vec<u8> = own.iter().flat_map(|hash| *hash.as_bytes()).collect();
        if let Some(stages) = self.stages() {
            let mut counts = vec![0; stages.own().count];
            decoder.whole().layers().into_iter().for_each(|layer| counts[decoder.owner(layer)] += EACH);
            layers = stages.gather(&layers, &counts)?;
        }
        let own = blake3::hash(&layers);
        let Some(tensor) = self.tensor() else { return Ok(own) };
        let counts = vec![EACH; self.slice().count];
        Ok(blake3::hash(&tensor.gather_all(own.as_bytes(), &counts)?))
    }

    /// A whole layer, in place of this rank's slice of it. The ranks of a tensor group call this
    /// together.
    pub fn join(&self, decoder: &Decoder, layer: LayerId, flat: &mut Vec<f32>) -> Result<()> {
        let Some(tensor) = self.tensor() else { return Ok(()) };
        let parts = tensor.gather_all(flat, &decoder.slice_lengths(layer))?;
        flat.clear();
        flat.resize(decoder.whole().trained(layer).len, 0.0);
        decoder.join(layer, &parts, flat);
        Ok(())
    }

    /// Whether this rank is of the same model as the first one, which writes: it has to put its
    /// layers together for that.
    pub fn sends_to_rank_zero(&self) -> bool {
        self.world.rank() < self.slice().count * self.stage().count
    }
}

/// Refuses ranks that cannot be divided as the config asks, and a model whose layers cannot be:
/// before any rank starts.
pub fn check(config: &Config, num_ranks: usize) -> Result<()> {
    let compute = &config.compute;
    check_ranks(compute, num_ranks)?;
    if compute.tensor * compute.pipeline > 1 {
        check_model(&recipe::for_method(config.method).open_folder(config, &config.model)?, compute)?;
    }
    Ok(())
}

fn check_model(folder: &ModelFolder, compute: &ComputeConfig) -> Result<()> {
    let refused = |key: &str, count: usize| {
        let place = folder.path().display().to_string();
        let key = key.to_owned();
        move |error| TrainError::Mismatch {
            reason: format!("compute.{key} = {count} does not fit {place}: {error}"),
        }
    };
    let ComputeConfig { tensor, pipeline, .. } = *compute;
    TensorParallelShard { index: 0, count: tensor }.spec(folder.spec()).map_err(refused("tensor", tensor))?;
    PipelineStage { index: 0, count: pipeline }
        .blocks(folder.spec())
        .map_err(refused("pipeline", pipeline))?;
    Ok(())
}

fn check_ranks(compute: &ComputeConfig, num_ranks: usize) -> Result<()> {
    let ComputeConfig { tensor, pipeline, replicate, .. } = *compute;
    let axes = [("tensor", tensor), ("pipeline", pipeline), ("replicate", replicate)];
    let unit: usize = axes.iter().map(|(_, count)| count).product();
    let reason = if replicate > 1 && compute.sharded().is_none() {
        format!(
            "compute.replicate = {replicate} counts the copies of sharded state, but compute.sharding = \"ddp\" shards \
             nothing: set it to \"zero1\", \"zero2\" or \"zero3\", or leave compute.replicate out"
        )
    } else if num_ranks.is_multiple_of(unit) {
        return Ok(());
    } else {
        let asked = axes.iter().filter(|(_, count)| *count > 1);
        let asked: Vec<_> = asked.map(|(key, count)| format!("compute.{key} = {count}")).collect();
        let asked = asked.join(" and ");
        let ranks = if num_ranks == 1 {
            "there is 1 rank".to_owned()
        } else {
            format!("there are {num_ranks} ranks")
        };
        format!(
            "{asked}, but {ranks}: their number must be a multiple of {unit} (set compute.devices = \"cpu:{unit}\", or \
             start as many processes)"
        )
    };
    Err(TrainError::Mismatch { reason })
}
