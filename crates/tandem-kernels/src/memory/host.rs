//! Access of the host to device memory: in place on a CPU, through a copy on a GPU.

use std::marker::PhantomData;
use std::ops::Range;

use crate::cpu;
use crate::cuda::Cuda;
use crate::cuda::Work;
use crate::cuda::bytes::{self, Plain};
use crate::memory::bytes::{Bytes, BytesMut, BytesView};
use crate::numerics::exact::{ExactViewMut, FixedPointSum};
use crate::{Device, Element, Result, States, StatesMut, StatesView, View, ViewMut, bf16};

impl Device {
    /// Calls `read` with the elements of a contiguous matrix after all work so far. A dry run does
    /// not call it and returns `None`.
    ///
    /// # Panics
    /// If the type differs or the view is not contiguous.
    pub fn host_read<E: Element, R>(&self, view: View, read: impl FnOnce(&[E]) -> R) -> Result<Option<R>> {
        assert!(view.is_contiguous() && view.dtype() == E::DTYPE, "host_read of {}", view.dtype());
        Ok(match self {
            Self::Cpu(_) => Some(read(view.as_slice())),
            Self::Cuda(cuda) => {
                let mut copy = vec![E::from_f32(0.0); view.len()];
                // SAFETY: the view borrows as many elements.
                unsafe { cuda.read(view.address(), &mut copy)? };
                Some(read(&copy))
            }
            Self::Meta(_) => None,
        })
    }

    /// Calls `write` to overwrite every element of a contiguous matrix; their old values are
    /// unspecified. A dry run does not call it.
    ///
    /// # Panics
    /// If the type differs or the view is not contiguous.
    pub fn host_write<E: Element, R>(
        &self,
        view: ViewMut,
        write: impl FnOnce(&mut [E]) -> R,
    ) -> Result<Option<R>> {
        assert!(view.is_contiguous() && view.dtype() == E::DTYPE, "host_write of {}", view.dtype());
        Ok(match self {
            Self::Cpu(_) => Some(write(view.into_slice())),
            Self::Cuda(cuda) => {
                let mut copy = vec![E::from_f32(f32::NAN); view.len()];
                let result = write(&mut copy);
                // SAFETY: the view borrows room for as many elements.
                unsafe { cuda.write(&copy, view.address())? };
                Some(result)
            }
            Self::Meta(_) => None,
        })
    }

    /// Calls `update` to change the elements of a contiguous matrix. A dry run does not call it.
    ///
    /// # Panics
    /// If the type differs or the view is not contiguous.
    pub fn host_update<E: Element, R>(
        &self,
        view: ViewMut,
        update: impl FnOnce(&mut [E]) -> R,
    ) -> Result<Option<R>> {
        let Self::Cuda(cuda) = self else { return self.host_write(view, update) };
        let address = view.address();
        self.host_write(view, |copy: &mut [E]| {
            // SAFETY: the view borrows as many elements.
            unsafe { cuda.read(address, copy)? };
            Ok(update(copy))
        })?
        .transpose()
    }

    /// Reads bytes; none on a dry run.
    pub fn read_bytes(&self, bytes: BytesView) -> Result<Vec<u8>> {
        Ok(match self {
            Self::Cpu(_) => bytes.as_slice().to_vec(),
            Self::Cuda(cuda) => self.read_plain(cuda, bytes.address(), bytes.len())?,
            Self::Meta(_) => Vec::new(),
        })
    }

    /// Writes host bytes. Does nothing on a dry run.
    ///
    /// # Panics
    /// If the lengths differ.
    pub fn write_bytes(&self, from: &[u8], to: BytesMut) -> Result<()> {
        assert_eq!(from.len(), to.len(), "bytes to write");
        match self {
            Self::Cpu(_) => to.into_slice().copy_from_slice(from),
            // SAFETY: the view borrows room for as many bytes.
            Self::Cuda(cuda) => unsafe { cuda.write(from, to.view().address())? },
            Self::Meta(_) => {}
        }
        Ok(())
    }

    /// Copies whole 4-byte words between two memories of this device. Does nothing on a dry run.
    ///
    /// # Panics
    /// If the lengths differ.
    pub fn copy_bytes(&self, from: BytesView, to: BytesMut) -> Result<()> {
        assert_eq!(from.len(), to.len(), "bytes to copy");
        match self {
            Self::Cpu(_) => to.into_slice().copy_from_slice(from.as_slice()),
            // SAFETY: the views borrow as many bytes, which lie apart: one of them is borrowed
            // mutably.
            Self::Cuda(cuda) => unsafe {
                let to = to.view().address();
                cuda.put(Work::Copy { from: from.address(), to, bytes: from.len() })?;
            },
            Self::Meta(_) => {}
        }
        Ok(())
    }

    /// Reads optimiser states as f32. Does nothing on a dry run.
    ///
    /// # Panics
    /// If `out` has another length.
    pub fn read_states(&self, states: StatesView, out: &mut [f32]) -> Result<()> {
        assert_eq!(out.len(), states.len(), "room for other states");
        match states {
            StatesView::F32(view) => self.host_read(view, |kept| out.copy_from_slice(kept))?,
            StatesView::Bf16(view) => self.host_read(view, |kept: &[bf16]| {
                out.iter_mut().zip(kept).for_each(|(out, x)| *out = x.to_f32());
            })?,
            StatesView::EightBit(view) => {
                let (words, scales, skipped) = view.blocks_of_words();
                let codes = skipped..skipped + view.len();
                self.host_read(words, |words: &[f32]| {
                    let codes = &bytes::as_bytes(words)[codes];
                    self.host_read(scales, |scales| {
                        cpu::states::read_codes(view.moment(), codes, scales, skipped, out);
                    })
                })?
                .transpose()?
                .flatten()
            }
        };
        Ok(())
    }

    /// Writes optimiser states from index `start` on, rounded to nearest. Does nothing on a dry
    /// run.
    ///
    /// # Panics
    /// As [`States::range_mut`]; and if fewer elements than a block are not the last ones.
    pub fn write_states(&self, values: &[f32], states: &mut States, start: usize) -> Result<()> {
        match states.part_mut(start, values.len()) {
            StatesMut::F32(view) => self.host_write(view, |kept| kept.copy_from_slice(values))?,
            StatesMut::Bf16(view, _) => self.host_write(view, |kept: &mut [bf16]| {
                kept.iter_mut().zip(values).for_each(|(kept, x)| *kept = bf16::from_f32(*x));
            })?,
            StatesMut::EightBit(view) => {
                let moment = view.moment();
                let (words, scales) = view.into_tensors();
                self.host_write(words, |words: &mut [f32]| {
                    let (codes, rest) = bytes::as_bytes_mut(words).split_at_mut(values.len());
                    rest.fill(0);
                    self.host_write(scales, |scales| {
                        cpu::states::write_codes(moment, values, codes, scales);
                    })
                })?
                .transpose()?
                .flatten()
            }
        };
        Ok(())
    }

    fn read_plain<T: Plain + Default>(&self, cuda: &Cuda, from: u64, len: usize) -> Result<Vec<T>> {
        let mut copy = vec![T::default(); len];
        // SAFETY: the callers have views of as many numbers.
        unsafe { cuda.read(from, &mut copy)? };
        Ok(copy)
    }
}

/// A borrowed range of GPU memory: its address, and copies to and from the host.
pub struct Remote<'a> {
    cuda: &'a Cuda,
    address: u64,
    len: usize,
    lifetime: PhantomData<&'a mut u8>,
}

impl<'a> Remote<'a> {
    fn new(device: &'a Device, address: u64, len: usize) -> Option<Self> {
        let Device::Cuda(cuda) = device else { return None };
        Some(Self { cuda, address, len, lifetime: PhantomData })
    }

    /// Borrows a contiguous matrix, if it is on a GPU.
    ///
    /// # Panics
    /// If it is not contiguous.
    pub fn from_view(device: &'a Device, view: ViewMut<'a>) -> Option<Self> {
        assert!(view.is_contiguous(), "a remote range of a strided view");
        Self::new(device, view.address(), view.num_bytes())
    }

    /// Borrows bytes, if they are on a GPU.
    pub fn from_bytes(device: &'a Device, bytes: BytesMut<'a>) -> Option<Self> {
        Self::new(device, bytes.view().address(), bytes.len())
    }

    /// Borrows sums, if they are on a GPU.
    pub fn from_sums(device: &'a Device, sums: ExactViewMut<'a>) -> Option<Self> {
        Self::new(device, sums.view().address(), size_of::<i64>() * sums.len())
    }

    /// Returns the number of bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Returns whether there is none.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Returns the GPU's number and the address.
    pub fn address(&self) -> (usize, u64) {
        (self.cuda.driver().properties().ordinal, self.address)
    }

    /// Returns the stream whose work writes and reads the range, as the driver knows it.
    pub fn stream(&self) -> Result<u64> {
        Ok(self.cuda.stream()?.0)
    }

    /// Waits until all work so far is done.
    pub fn flush(&self) -> Result<()> {
        self.cuda.synchronize()
    }

    /// Copies bytes to the host after all work so far.
    ///
    /// # Panics
    /// If the lengths differ.
    pub fn read(&self, range: Range<usize>, to: &mut [u8]) -> Result<()> {
        assert!(range.end <= self.len && range.len() == to.len(), "bytes {range:?} of {}", self.len);
        // SAFETY: the range is inside what is borrowed.
        unsafe { self.cuda.read(self.address + range.start as u64, to) }
    }

    /// Copies bytes from the host after all work so far.
    ///
    /// # Panics
    /// If the lengths differ.
    pub fn write(&mut self, range: Range<usize>, from: &[u8]) -> Result<()> {
        assert!(range.end <= self.len && range.len() == from.len(), "bytes {range:?} of {}", self.len);
        // SAFETY: the range is inside what is borrowed exclusively.
        unsafe { self.cuda.write(from, self.address + range.start as u64) }
    }
}

impl Bytes {
    /// Reads all bytes; none on a dry run.
    pub fn read(&self, device: &Device) -> Result<Vec<u8>> {
        device.read_bytes(self.view())
    }
}

impl ExactViewMut<'_> {
    /// Sets every sum to zero. Does nothing on a dry run.
    pub fn clear(self, device: &Device) -> Result<()> {
        match device {
            Device::Cpu(_) => self.into_slice().fill(0),
            Device::Cuda(cuda) => {
                let (at, bytes) = (self.view().address(), size_of::<i64>() * self.len());
                // SAFETY: the sums are borrowed exclusively.
                unsafe { cuda.put(Work::Clear { at, bytes })? };
            }
            Device::Meta(_) => {}
        }
        Ok(())
    }
}

impl FixedPointSum {
    /// Overwrites all sums. Does nothing on a dry run.
    ///
    /// # Panics
    /// If the lengths differ.
    pub fn write(&mut self, device: &Device, sums: &[i64]) -> Result<()> {
        assert_eq!(sums.len(), self.len(), "sums to write");
        match device {
            Device::Cpu(_) => self.as_mut_slice().copy_from_slice(sums),
            // SAFETY: the sums are borrowed exclusively, and are as many.
            Device::Cuda(cuda) => unsafe { cuda.write(sums, self.view().address())? },
            Device::Meta(_) => {}
        }
        Ok(())
    }

    /// Reads all sums; none on a dry run.
    pub fn read(&self, device: &Device) -> Result<Vec<i64>> {
        Ok(match device {
            Device::Cpu(_) => self.as_slice().to_vec(),
            Device::Cuda(cuda) => device.read_plain(cuda, self.view().address(), self.len())?,
            Device::Meta(_) => Vec::new(),
        })
    }
}
