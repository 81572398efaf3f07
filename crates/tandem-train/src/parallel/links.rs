//! Messages between neighbouring pipeline stages on GPUs.
//!
//! A message goes from GPU to GPU where the engine can (NCCL), and waits in a stream until it is received. So
//! each direction between two stages has a group of its own, and a rank sends in a stream of its own: two
//! stages that send to each other do not wait for each other. A rank receives in the stream that computes.

use std::cell::RefCell;

use tandem_comm::ProcessGroup;
use tandem_kernels::{DType, Device, Extent, MemoryKind, Tensor, ops};

use crate::Result;
use crate::parallel::collective_buffer;
use crate::placement::async_transfer::AsyncTransfer;

/// Links of a stage to its neighbours.
pub(super) struct StageLinks {
    /// Type in which tensors travel.
    wire: DType,
    before: Option<Neighbour>,
    after: Option<Neighbour>,
}

/// Both directions between two stages.
struct Neighbour {
    incoming: RefCell<ProcessGroup>,
    outgoing: RefCell<Outgoing>,
}

enum Outgoing {
    /// Nothing has been sent yet.
    Unused(Option<ProcessGroup>),
    Used(AsyncTransfer<Tensor>),
}

impl StageLinks {
    /// Connects neighbours of a group with one rank per stage, in order. All ranks call this.
    pub(super) fn new(stages: &mut ProcessGroup, wire: DType) -> Result<Self> {
        let (stage, count) = (stages.rank(), stages.size());
        // Pairs that begin at even stages and at odd ones, forward and backward.
        let mut pairs = |skipped: usize| -> Result<[ProcessGroup; 2]> {
            let mut pair = || stages.split_by(|stage| (stage + skipped) / 2);
            Ok([pair()?, pair()?])
        };
        let (even, odd) = (pairs(0)?, pairs(1)?);
        let ([to_after, from_after], [from_before, to_before]) =
            if stage.is_multiple_of(2) { (even, odd) } else { (odd, even) };
        let after = (stage + 1 < count).then(|| Neighbour::new(from_after, to_after));
        let before = (stage > 0).then(|| Neighbour::new(from_before, to_before));
        Ok(Self { wire, before, after })
    }

    /// Sends a tensor of f32 to the next stage, or the one before. The message before has been received
    /// when the device goes on.
    pub(super) fn send(&self, forward: bool, device: &Device, x: Tensor) -> Result<()> {
        let x = if self.wire == DType::F32 {
            x
        } else {
            let mut rounded = self.room_like(device, &x)?;
            ops::cast(device, x.view(), rounded.view_mut())?;
            rounded
        };
        let link = if forward { &self.after } else { &self.before };
        let mut outgoing = link.as_ref().expect(NEIGHBOUR).outgoing.borrow_mut();
        if let Outgoing::Unused(group) = &mut *outgoing {
            let group = group.take().expect("it is used once");
            let (name, to) = (format!("rank {} send", group.rank()), 1 - group.rank());
            let send = move |by: &Device, group: &mut ProcessGroup, x: &mut Tensor| {
                group.send_numbers(to, collective_buffer::tensor(by, x))
            };
            *outgoing = Outgoing::Used(AsyncTransfer::new(device, &name, group, 1, true, send)?);
        }
        let Outgoing::Used(transfer) = &mut *outgoing else { unreachable!("it was made above") };
        if let Some((_, outcome)) = transfer.end() {
            outcome?;
        }
        transfer.begin(x);
        Ok(())
    }

    /// Receives a tensor of f32 from the stage before, or the next one.
    pub(super) fn recv(&self, forward: bool, device: &Device, x: &mut Tensor) -> Result<()> {
        let link = if forward { &self.before } else { &self.after };
        let mut group = link.as_ref().expect(NEIGHBOUR).incoming.borrow_mut();
        let from = 1 - group.rank();
        if self.wire == DType::F32 {
            return Ok(group.recv_numbers(from, collective_buffer::tensor(device, x))?);
        }
        let mut rounded = self.room_like(device, x)?;
        group.recv_numbers(from, collective_buffer::tensor(device, &mut rounded))?;
        Ok(ops::cast(device, rounded.view(), x.view_mut())?)
    }

    /// Allocates a tensor of the wire's type.
    fn room_like(&self, device: &Device, x: &Tensor) -> Result<Tensor> {
        let cols = Extent::exact(x.cols());
        Ok(device.alloc_in(MemoryKind::Activations, x.extent(), cols, self.wire)?)
    }
}

impl Neighbour {
    fn new(incoming: ProcessGroup, outgoing: ProcessGroup) -> Self {
        Self { incoming: RefCell::new(incoming), outgoing: RefCell::new(Outgoing::Unused(Some(outgoing))) }
    }
}

const NEIGHBOUR: &str = "the first stage has none before it, the last none behind";

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use tandem_comm::threads;

    use super::*;

    /// Longer than anything here takes.
    const PATIENCE: Duration = Duration::from_secs(600);

    fn tensor(device: &Device, x: f32) -> Tensor {
        let mut tensor = device.zeros(MemoryKind::Activations, 2, 3, DType::F32).unwrap();
        device.host_write(tensor.view_mut(), |all: &mut [f32]| all.fill(x)).unwrap();
        tensor
    }

    /// Every stage sends in both directions before it receives: nobody waits for a receiver.
    #[test]
    fn neighbours_send_to_each_other_at_once_in_the_wires_type() {
        for (wire, expected) in [(DType::F32, 1.0 + 1.0 / 1024.0), (DType::Bf16, 1.0)] {
            for count in [2, 3, 4] {
                std::thread::scope(|scope| {
                    for mut group in threads::groups(count, PATIENCE) {
                        scope.spawn(move || {
                            let device = Device::cpu(1, 1 << 21).unwrap();
                            let stage = group.rank();
                            let links = StageLinks::new(&mut group, wire).unwrap();
                            let value = |stage: usize| stage as f32 * 16.0 + 1.0 + 1.0 / 1024.0;
                            let seen = |stage: usize| if stage == 0 { expected } else { value(stage) };
                            for round in 0..3 {
                                let (has_after, has_before) = (stage + 1 < count, stage > 0);
                                for forward in [true, false] {
                                    if if forward { has_after } else { has_before } {
                                        links.send(forward, &device, tensor(&device, value(stage))).unwrap();
                                    }
                                }
                                for (forward, from) in
                                    [(true, stage.checked_sub(1)), (false, Some(stage + 1))]
                                {
                                    let Some(from) = from.filter(|&from| from < count) else { continue };
                                    let mut x = tensor(&device, 0.0);
                                    links.recv(forward, &device, &mut x).unwrap();
                                    let first = device.host_read(x.view(), |x: &[f32]| x[5]).unwrap();
                                    let close =
                                        |x: f32| (x - seen(from)).abs() <= if from == 0 { 0.0 } else { 0.5 };
                                    assert!(first.is_some_and(close), "{first:?} of {from}, round {round}");
                                }
                            }
                            group.barrier().unwrap();
                        });
                    }
                });
            }
        }
    }
}
