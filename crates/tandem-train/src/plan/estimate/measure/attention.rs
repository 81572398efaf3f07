//! Attention of a batch, forward and backward, on operands of its own.

use std::time::Duration;

use tandem_kernels::ops::{self, AttentionShape};
use tandem_kernels::{DType, Device, Forest, MemoryKind, Tensor};

use super::{least_seconds, numbers};
use crate::Result;

/// Operands and results of attention on a device.
pub(crate) struct AttentionCase {
    device: Device,
    forest: Forest,
    shape: AttentionShape,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    d_out: Tensor,
    out: Tensor,
    log_sum_exp: Tensor,
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
}

impl AttentionCase {
    /// Fills the operands of a batch.
    ///
    /// # Errors
    /// The device has no room.
    pub(crate) fn new(device: &Device, shape: AttentionShape, dtype: DType, forest: Forest) -> Result<Self> {
        let tokens = forest.num_tokens();
        let (wide, narrow) = (shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim);
        let filled = |cols| numbers(device, tokens, cols, dtype);
        let zeros = |cols, dtype| device.zeros(MemoryKind::Scratch, tokens, cols, dtype);
        Ok(Self {
            q: filled(wide)?,
            k: filled(narrow)?,
            v: filled(narrow)?,
            d_out: filled(wide)?,
            out: zeros(wide, dtype)?,
            log_sum_exp: zeros(shape.heads, DType::F32)?,
            dq: zeros(wide, dtype)?,
            dk: zeros(narrow, dtype)?,
            dv: zeros(narrow, dtype)?,
            device: device.clone(),
            forest,
            shape,
        })
    }

    /// Computes the output and the log-sum-exp.
    ///
    /// # Errors
    /// The device fails.
    pub(crate) fn forward(&mut self) -> Result<()> {
        let call = ops::Attention {
            q: self.q.view(),
            k: self.k.view(),
            v: self.v.view(),
            forest: &self.forest,
            first_query: 0,
            shape: &self.shape,
            out: self.out.view_mut(),
            log_sum_exp: self.log_sum_exp.view_mut(),
        };
        Ok(ops::attention(&self.device, call)?)
    }

    /// Computes the gradients from what [`Self::forward`] has left.
    ///
    /// # Errors
    /// The device fails.
    pub(crate) fn backward(&mut self) -> Result<()> {
        let call = ops::AttentionBackward {
            q: self.q.view(),
            k: self.k.view(),
            v: self.v.view(),
            out: self.out.view(),
            log_sum_exp: self.log_sum_exp.view(),
            d_out: self.d_out.view(),
            forest: &self.forest,
            shape: &self.shape,
            model_kv_heads: self.shape.kv_heads,
            dq: self.dq.view_mut(),
            dk: self.dk.view_mut(),
            dv: self.dv.view_mut(),
        };
        Ok(ops::attention_backward(&self.device, call)?)
    }

    /// Seconds of a forward and a backward pass, each repeated for about `patience`.
    ///
    /// # Errors
    /// The device fails.
    pub(crate) fn seconds(&mut self, patience: Duration) -> Result<f64> {
        let device = self.device.clone();
        let forward = least_seconds(&device, patience, &mut || self.forward())?;
        Ok(forward + least_seconds(&device, patience, &mut || self.backward())?)
    }

    /// Reads the output and the gradients of queries, keys and values.
    ///
    /// # Errors
    /// The device fails.
    pub(crate) fn results(&self) -> Result<[Vec<f32>; 4]> {
        let read = |tensor: &Tensor| ops::read_f32(&self.device, tensor.view());
        Ok([read(&self.out)?, read(&self.dq)?, read(&self.dk)?, read(&self.dv)?])
    }
}
