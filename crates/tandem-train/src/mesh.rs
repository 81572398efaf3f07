//! The ranks as a grid, data × tensor.
//!
//! Neighbours form a *tensor group*: they hold the slices of one model and compute the same micro-batches together. The ranks
//! that hold the same slice form a *data group*: they divide micro-batches, and with sharding what is kept of the slice.
//! Without a tensor axis all ranks are one data group.

use std::cell::RefCell;

use tandem_comm::{Call, ElementKind, Group, Operation, Reduction};
use tandem_kernels::Tensor;
use tandem_model::{Decoder, LayerId, ModelFolder, Result as ModelResult, Slice, Split};

use crate::config::Config;
use crate::store::lost;
use crate::{Result, TrainError};

/// All ranks, and this one's groups among them.
pub struct Mesh {
    world: Group,
    axes: Option<Axes>,
}

struct Axes {
    data: Group,
    tensor: TensorGroup,
}

/// The ranks that hold the slices of one model.
struct TensorGroup(RefCell<Group>);

impl Mesh {
    /// Divides the ranks: `tensor` neighbours hold one model.
    ///
    /// # Errors
    /// If their number is not a multiple of `tensor`, or a rank is lost.
    pub fn new(mut world: Group, tensor: usize) -> Result<Self> {
        check_ranks(tensor, world.size())?;
        if tensor == 1 {
            return Ok(Self { world, axes: None });
        }
        let data = world.split_by(|rank| rank % tensor)?;
        let tensor = world.split_by(|rank| rank / tensor)?;
        Ok(Self { world, axes: Some(Axes { data, tensor: TensorGroup(RefCell::new(tensor)) }) })
    }

    /// One rank.
    pub fn alone() -> Self {
        Self { world: Group::alone(), axes: None }
    }

    /// All ranks.
    pub fn world(&mut self) -> &mut Group {
        &mut self.world
    }

    /// The ranks that hold the same slice as this one.
    pub fn data(&mut self) -> &mut Group {
        self.in_walk().0
    }

    /// The ranks that hold the same slice, and those that hold the others: who meets in a walk.
    pub fn in_walk(&mut self) -> (&mut Group, Option<&dyn Split>) {
        match &mut self.axes {
            Some(Axes { data, tensor }) => (data, Some(tensor)),
            None => (&mut self.world, None),
        }
    }

    /// Those who hold the other slices of this rank's model.
    pub fn split(&self) -> Option<&dyn Split> {
        self.axes.as_ref().map(|axes| &axes.tensor as &dyn Split)
    }

    /// Which slice this rank holds.
    pub fn slice(&self) -> Slice {
        self.axes.as_ref().map_or(Slice::WHOLE, |axes| {
            let tensor = axes.tensor.0.borrow();
            Slice { index: tensor.rank(), count: tensor.size() }
        })
    }

    /// Whether this rank speaks for its tensor group, all of which know the same.
    pub fn leads(&self) -> bool {
        self.slice().index == 0
    }

    /// What each rank of the tensor group says, added in the order of slices: the same bits on all of them.
    ///
    /// # Errors
    /// If a rank is lost.
    pub fn sum_of_slices(&self, own: f64) -> Result<f64> {
        let Some(split) = self.split() else { return Ok(own) };
        let Slice { index, count } = self.slice();
        let mut each = vec![0.0; count];
        each[index] = own;
        split.gather(&mut each)?;
        Ok(each.iter().sum())
    }

    /// The fingerprint of a whole model from those of its slices.
    ///
    /// # Errors
    /// If a rank is lost.
    pub fn whole_fingerprint(&self, own: blake3::Hash) -> Result<blake3::Hash> {
        let Some(Axes { tensor, .. }) = &self.axes else { return Ok(own) };
        let Slice { index, count } = self.slice();
        let each = own.as_bytes().len();
        let mut all = vec![0u8; count * each];
        all[index * each..(index + 1) * each].copy_from_slice(own.as_bytes());
        tensor.0.borrow_mut().all_gather(&mut all, &vec![each; count])?;
        Ok(blake3::hash(&all))
    }

    /// A whole layer, in place of this rank's slice of it. The ranks of a tensor group call this together.
    ///
    /// # Errors
    /// If a rank is lost.
    pub fn join(&self, decoder: &Decoder, layer: LayerId, flat: &mut Vec<f32>) -> Result<()> {
        let Some(Axes { tensor, .. }) = &self.axes else { return Ok(()) };
        let (index, counts) = (self.slice().index, decoder.slice_lengths(layer));
        let start: usize = counts[..index].iter().sum();
        let mut parts = vec![0.0; counts.iter().sum()];
        parts[start..start + counts[index]].copy_from_slice(flat);
        tensor.0.borrow_mut().all_gather(&mut parts, &counts)?;
        flat.clear();
        flat.resize(decoder.whole().layout(layer).len, 0.0);
        decoder.join(layer, &parts, flat);
        Ok(())
    }

    /// Whether this rank has to hand its slices over to the first one, which writes.
    pub fn serves_first(&self) -> bool {
        let Slice { index, count } = self.slice();
        index > 0 && self.world.rank() < count
    }
}

impl Split for TensorGroup {
    fn sum(&self, x: &mut Tensor) -> ModelResult<()> {
        let mut group = self.0.borrow_mut();
        if x.is_meta() {
            let len = x.view().len();
            let call = Call::whole(Operation::AllReduce(Reduction::Sum), ElementKind::F32, len);
            return group.dry(call).map_err(lost);
        }
        group.all_reduce(x.view_mut().into_slice::<f32>(), Reduction::Sum).map_err(lost)
    }

    fn gather(&self, numbers: &mut [f64]) -> ModelResult<()> {
        let mut group = self.0.borrow_mut();
        let counts = vec![numbers.len() / group.size(); group.size()];
        group.all_gather(numbers, &counts).map_err(lost)
    }
}

/// Refuses ranks that cannot be divided as the config asks, and a model whose layers cannot be: before any rank starts.
///
/// # Errors
/// If so, or the model's config cannot be read.
pub fn check(config: &Config, num_ranks: usize) -> Result<()> {
    let tensor = config.compute.tensor;
    check_ranks(tensor, num_ranks)?;
    if tensor > 1 {
        let folder = ModelFolder::open(&config.model)?;
        check_model(&folder, tensor)?;
    }
    Ok(())
}

fn check_model(folder: &ModelFolder, tensor: usize) -> Result<()> {
    let refused = |error| TrainError::Mismatch {
        reason: format!("compute.tensor = {tensor} does not fit {}: {error}", folder.path().display()),
    };
    Slice { index: 0, count: tensor }.spec(folder.spec()).map(drop).map_err(refused)
}

fn check_ranks(tensor: usize, num_ranks: usize) -> Result<()> {
    if num_ranks.is_multiple_of(tensor) {
        return Ok(());
    }
    let ranks =
        if num_ranks == 1 { "there is 1 rank".to_owned() } else { format!("there are {num_ranks} ranks") };
    Err(TrainError::Mismatch {
        reason: format!(
            "compute.tensor = {tensor}, but {ranks}: their number must be a multiple of it (set compute.devices = \
             \"cpu:{tensor}\", or start as many processes)"
        ),
    })
}
