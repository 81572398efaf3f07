//! A device's numbers as host memory: in place where they are there already, else through a copy.

use crate::bytes::{Bytes, BytesMut, BytesView};
use crate::cuda::bytes::Plain;
use crate::exact::ExactSum;
use crate::{Device, Element, Result, View, ViewMut};

impl Device {
    /// Shows `read` the elements of a contiguous matrix, after all work so far, and returns what it does; on a dry run it
    /// is not called, and the answer is `None`.
    ///
    /// # Panics
    /// If the type differs or the view is not contiguous.
    ///
    /// # Errors
    /// If a GPU cannot give them.
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

    /// Has `write` overwrite the elements of a contiguous matrix, every one of them: what they are before is unspecified. On a dry
    /// run it is not called.
    ///
    /// # Panics
    /// If the type differs or the view is not contiguous.
    ///
    /// # Errors
    /// If a GPU cannot take them.
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

    /// Bytes as the host sees them; none on a dry run.
    ///
    /// # Errors
    /// If a GPU cannot give them.
    pub fn read_bytes(&self, bytes: BytesView) -> Result<Vec<u8>> {
        Ok(match self {
            Self::Cpu(_) => bytes.as_slice().to_vec(),
            Self::Cuda(cuda) => self.read_plain(cuda, bytes.address(), bytes.len())?,
            Self::Meta(_) => Vec::new(),
        })
    }

    /// Overwrites bytes by those of the host. Nothing on a dry run.
    ///
    /// # Panics
    /// If there are not as many.
    ///
    /// # Errors
    /// If a GPU cannot take them.
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

    fn read_plain<T: Plain + Default>(
        &self,
        cuda: &crate::cuda::Cuda,
        from: u64,
        len: usize,
    ) -> Result<Vec<T>> {
        let mut copy = vec![T::default(); len];
        // SAFETY: the callers have views of as many numbers.
        unsafe { cuda.read(from, &mut copy)? };
        Ok(copy)
    }
}

impl Bytes {
    /// All of them as the host sees them; none on a dry run.
    ///
    /// # Errors
    /// If a GPU cannot give them.
    pub fn read(&self, device: &Device) -> Result<Vec<u8>> {
        device.read_bytes(self.view())
    }
}

impl ExactSum {
    /// All sums as the host sees them; none on a dry run.
    ///
    /// # Errors
    /// If a GPU cannot give them.
    pub fn read(&self, device: &Device) -> Result<Vec<i64>> {
        Ok(match device {
            Device::Cpu(_) => self.as_slice().to_vec(),
            Device::Cuda(cuda) => device.read_plain(cuda, self.view().address(), self.len())?,
            Device::Meta(_) => Vec::new(),
        })
    }
}
