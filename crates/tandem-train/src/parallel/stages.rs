//! Pipeline group of a model: transfers between stages, and the pass over all stages.

use std::cell::RefCell;
use std::ops::AddAssign;

use tandem_comm::{Element, ElementKind, ProcessGroup, Reduction};
use tandem_kernels::ops::HeadScores;
use tandem_kernels::{DType, Device, Extent, Forest, MemoryKind, Tensor};
use tandem_model::{
    DivergencePass, Gradient, GradientSink, LayerExecutor, ModelError, PipelineOps, PipelineStage,
    PolicyAndReferenceScores, Result as ModelResult, SavedActivations, WeightSource,
};

use crate::Result;
use crate::parallel::links::StageLinks;

/// One stage's end of a pipeline.
pub struct PipelineGroup {
    group: RefCell<ProcessGroup>,
    /// Links to the neighbours, on GPUs.
    links: Option<StageLinks>,
}

impl PipelineGroup {
    /// Creates it from a group with one rank per stage, in order. On GPUs the residual stream travels in the
    /// type `wire`, from GPU to GPU where the engine can. All ranks call this.
    pub fn new(mut group: ProcessGroup, wire: Option<DType>) -> Result<Self> {
        let links = wire.map(|wire| StageLinks::new(&mut group, wire)).transpose()?;
        Ok(Self { group: RefCell::new(group), links })
    }

    /// Which stage this is.
    pub fn own(&self) -> PipelineStage {
        let group = self.group.borrow();
        PipelineStage { index: group.rank(), count: group.size() }
    }

    /// Hands a tensor of f32 to a neighbouring stage.
    pub fn send(&self, to: usize, device: &Device, x: Tensor) -> Result<()> {
        match &self.links {
            Some(links) => links.send(to > self.own().index, device, x),
            None => self.send_over_host(to, device, &x),
        }
    }

    fn send_over_host(&self, to: usize, device: &Device, x: &Tensor) -> Result<()> {
        let mut group = self.group.borrow_mut();
        match device.host_read(x.view(), |x: &[f32]| group.send(to, x))? {
            Some(sent) => Ok(sent?),
            None => Ok(group.dry_send(to, ElementKind::F32, x.view().len())?),
        }
    }

    /// Receives this shard's rows of the residual stream or its gradient from another stage,
    /// `[T,D]` f32.
    pub fn recv(&self, from: usize, executor: &LayerExecutor<'_>, forest: &Forest) -> Result<Tensor> {
        let (rows, width) =
            (executor.stream_rows(forest), Extent::exact(executor.decoder.spec().hidden_size));
        let mut x = executor.device.alloc_in(MemoryKind::Activations, rows, width, DType::F32)?;
        match &self.links {
            Some(links) => links.recv(from < self.own().index, executor.device, &mut x)?,
            None => self.recv_over_host(from, executor.device, &mut x)?,
        }
        Ok(x)
    }

    /// Receives a tensor of f32 from another stage.
    fn recv_over_host(&self, from: usize, device: &Device, x: &mut Tensor) -> Result<()> {
        let mut group = self.group.borrow_mut();
        match device.host_write(x.view_mut(), |x: &mut [f32]| group.recv(from, x))? {
            Some(received) => Ok(received?),
            None => Ok(group.dry_recv(from, ElementKind::F32, x.view().len())?),
        }
    }

    /// Adds another stage's sums of a tied tensor to `sums`; both stages call this and end with
    /// equal sums. `room` bounds the numbers per message.
    ///
    /// # Panics
    /// The buffer is empty.
    pub fn add_up<T: Element + AddAssign>(&self, with: usize, sums: &mut [T], room: &mut [T]) -> Result<()> {
        let mut group = self.group.borrow_mut();
        for piece in sums.chunks_mut(room.len()) {
            group.send(with, piece)?;
            let theirs = &mut room[..piece.len()];
            group.recv(with, theirs)?;
            piece.iter_mut().zip(theirs).for_each(|(sum, term)| *sum += *term);
        }
        Ok(())
    }

    /// Makes the calls of [`PipelineGroup::add_up`] in a dry run, for `len` numbers with room for `piece`.
    pub fn dry_add_up(&self, with: usize, kind: ElementKind, len: usize, piece: usize) -> Result<()> {
        let mut group = self.group.borrow_mut();
        for start in (0..len).step_by(piece) {
            let len = piece.min(len - start);
            group.dry_send(with, kind, len)?;
            group.dry_recv(with, kind, len)?;
        }
        Ok(())
    }

    /// Sums over all stages numbers whose sum has no order.
    pub fn all_reduce<T: Element>(&self, numbers: &mut [T]) -> Result<()> {
        Ok(self.group.borrow_mut().all_reduce(numbers, Reduction::Sum)?)
    }

    /// Broadcasts from the last stage.
    pub fn broadcast_from_last<T: Element>(&self, data: &mut [T]) -> Result<()> {
        let mut group = self.group.borrow_mut();
        let last = group.size() - 1;
        Ok(group.broadcast(data, last)?)
    }

    /// Gathers bytes of all stages in order; `counts` are per stage.
    pub fn gather(&self, own: &[u8], counts: &[usize]) -> Result<Vec<u8>> {
        Ok(self.group.borrow_mut().gather(own, counts)?)
    }

    /// Asks another stage for numbers that it is about to [`PipelineGroup::answer`].
    pub fn ask(&self, stage: usize, numbers: &mut [f32]) -> Result<()> {
        let mut group = self.group.borrow_mut();
        // Sends only on request: messages in flight take memory.
        group.send(stage, &[0u8])?;
        Ok(group.recv(stage, numbers)?)
    }

    /// Gives the first stage numbers when it asks for them.
    pub fn answer(&self, numbers: &[f32]) -> Result<()> {
        let mut group = self.group.borrow_mut();
        group.recv(0, &mut [0u8])?;
        Ok(group.send(0, numbers)?)
    }
}

impl PipelineOps for PipelineGroup {
    fn send_stream(&self, device: &Device, x: &Tensor) -> ModelResult<()> {
        self.send_over_host(self.own().index + 1, device, x).map_err(lost)
    }

    fn recv_stream(&self, device: &Device, x: &mut Tensor) -> ModelResult<()> {
        self.recv_over_host(self.own().index - 1, device, x).map_err(lost)
    }

    fn broadcast_from_last(&self, numbers: &mut [i64]) -> ModelResult<()> {
        Self::broadcast_from_last(self, numbers).map_err(lost)
    }
}

/// Error of the model's code for a transfer that failed.
fn lost(error: crate::TrainError) -> ModelError {
    ModelError::Store(Box::new(error))
}

/// Executor of one stage, from the received stream to the sent one.
#[derive(Clone, Copy)]
pub struct StagedExecutor<'a> {
    /// The walk over this stage's layers.
    pub executor: LayerExecutor<'a>,
    /// Pipeline group, if the decoder is a stage.
    pub stages: Option<&'a PipelineGroup>,
}

impl StagedExecutor<'_> {
    /// Returns whether this is the last stage, which has the head.
    pub fn is_last(&self) -> bool {
        self.executor.decoder.stage().is_last()
    }

    /// Forward; the last stage scores the forest's predictions. With `keep`,
    /// [`StagedExecutor::backward`] will follow. A reference that shares the base goes along where
    /// there is room for its scores.
    ///
    /// # Errors
    /// A token is outside the vocabulary, weights cannot be loaded, or memory runs out.
    pub fn forward(
        &self,
        weights: &mut dyn WeightSource,
        forest: &Forest,
        scores: PolicyAndReferenceScores<&mut HeadScores>,
        keep: bool,
    ) -> Result<SavedActivations> {
        let own = self.executor.decoder.stage().index;
        let recv = |stages: &PipelineGroup| -> Result<_> {
            let reference = scores
                .reference
                .as_ref()
                .map(|_| stages.recv(own - 1, &self.executor, forest))
                .transpose()?;
            Ok(PolicyAndReferenceScores { policy: stages.recv(own - 1, &self.executor, forest)?, reference })
        };
        let x = self.stages.filter(|_| own > 0).map(recv).transpose()?;
        let (x, saved) = self.executor.stage_forward(weights, forest, x, scores, keep)?;
        if let Some((stages, x)) = self.stages.zip(x) {
            x.reference.map_or(Ok(()), |x| stages.send(own + 1, self.executor.device, x))?;
            stages.send(own + 1, self.executor.device, x.policy)?;
        }
        Ok(saved)
    }

    /// Backward; the last stage begins with the scores and the derivative by each prediction's
    /// log-probability, or with `divergence` by its divergence.
    pub fn backward<'b>(
        &self,
        weights: &mut dyn WeightSource,
        grads: &mut dyn GradientSink,
        forest: &Forest,
        saved: SavedActivations,
        (scores, derivative): (&'b HeadScores, &'b [f32]),
        divergence: Option<DivergencePass<'b>>,
    ) -> Result<()> {
        let own = self.executor.decoder.stage().index;
        let end = match (self.stages.filter(|_| !self.is_last()), divergence) {
            (Some(stages), _) => Gradient::OfStream(stages.recv(own + 1, &self.executor, forest)?),
            (None, Some(pass)) => Gradient::OfDivergence { scores, d_divergence: derivative, pass },
            (None, None) => Gradient::OfScores { scores, d_log_prob: derivative },
        };
        let dx = self.executor.stage_backward(weights, grads, forest, saved, end)?;
        if let Some((stages, dx)) = self.stages.zip(dx) {
            stages.send(own - 1, self.executor.device, dx)?;
        }
        Ok(())
    }
}
