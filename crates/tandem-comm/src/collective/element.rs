//! Numbers that ranks exchange.

use std::fmt;
use std::ops::Range;

use half::bf16;

/// Element type.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ElementKind {
    /// Bytes that are only moved.
    U8,
    /// 64-bit integers: the exact gradient sum.
    I64,
    /// 64-bit floats: metrics.
    F64,
    /// 32-bit floats.
    F32,
    /// bfloat16; a sum is rounded after every addition.
    Bf16,
}

impl ElementKind {
    /// Returns the bytes of one element.
    pub const fn size(self) -> usize {
        match self {
            Self::U8 => 1,
            Self::Bf16 => 2,
            Self::F32 => 4,
            Self::I64 | Self::F64 => 8,
        }
    }
}

impl fmt::Display for ElementKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::U8 => "u8",
            Self::I64 => "i64",
            Self::F64 => "f64",
            Self::F32 => "f32",
            Self::Bf16 => "bf16",
        })
    }
}

/// A type of numbers that ranks can exchange.
pub trait Element: bytemuck::Pod + Send + Sync {
    /// The element type.
    const KIND: ElementKind;
}

/// Numbers of one type in host or device memory; in a dry run only their count.
pub struct CollectiveBuffer<'a> {
    pub(crate) kind: ElementKind,
    pub(crate) len: usize,
    pub(crate) memory: Memory<'a>,
}

/// Location of numbers.
pub(crate) enum Memory<'a> {
    /// No memory: a dry run.
    Nowhere,
    /// Host memory.
    Host(&'a mut [u8]),
    /// Device memory.
    Device(Box<dyn DeviceNumbers + 'a>),
}

/// Numbers in device memory, addressed by bytes.
pub trait DeviceNumbers {
    /// Returns the GPU's ordinal among those of this process, and the address.
    fn address(&self) -> (usize, u64);

    /// Returns the stream whose work writes and reads the numbers, a `CUstream`; all work so far is in it.
    fn stream(&self) -> Result<u64, String>;

    /// Waits for the work in the stream.
    fn synchronize(&mut self) -> Result<(), String>;

    /// Copies bytes to the host, after the device's queued work.
    fn read(&mut self, range: Range<usize>, to: &mut [u8]) -> Result<(), String>;

    /// Copies bytes from the host.
    fn write(&mut self, range: Range<usize>, from: &[u8]) -> Result<(), String>;
}

impl CollectiveBuffer<'_> {
    /// Creates `len` numbers without memory.
    pub fn dry(kind: ElementKind, len: usize) -> Self {
        Self { kind, len, memory: Memory::Nowhere }
    }
}

impl<'a> CollectiveBuffer<'a> {
    /// Wraps `len` numbers in device memory.
    pub fn on_device(kind: ElementKind, len: usize, numbers: impl DeviceNumbers + 'a) -> Self {
        Self { kind, len, memory: Memory::Device(Box::new(numbers)) }
    }
}

impl<'a, T: Element> From<&'a mut [T]> for CollectiveBuffer<'a> {
    fn from(data: &'a mut [T]) -> Self {
        Self { kind: T::KIND, len: data.len(), memory: Memory::Host(bytemuck::cast_slice_mut(data)) }
    }
}

/// Reduction of several numbers to one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Reduction {
    /// The sum. Integers wrap; floats are added in the engine's documented order.
    Sum,
    /// The maximum.
    Max,
}

impl fmt::Display for Reduction {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Sum => "sum",
            Self::Max => "max",
        })
    }
}

macro_rules! elements {
    ($($type:ty => $kind:ident),*) => {
        $(impl Element for $type {
            const KIND: ElementKind = ElementKind::$kind;
        })*
    };
}

elements!(u8 => U8, i64 => I64, f64 => F64, f32 => F32, bf16 => Bf16);

/// `into ← reduce(into, from)`, element by element.
///
/// # Panics
/// If the slices differ in length or are not aligned for `kind`.
pub(crate) fn reduce(kind: ElementKind, reduction: Reduction, into: &mut [u8], from: &[u8]) {
    fn fold<T: Element>(into: &mut [u8], from: &[u8], combine: impl Fn(T, T) -> T) {
        let (into, from): (&mut [T], &[T]) = (bytemuck::cast_slice_mut(into), bytemuck::cast_slice(from));
        assert_eq!(into.len(), from.len(), "parts of one collective differ in length");
        into.iter_mut().zip(from).for_each(|(into, from)| *into = combine(*into, *from));
    }
    match (kind, reduction) {
        (ElementKind::U8, Reduction::Sum) => fold(into, from, u8::wrapping_add),
        (ElementKind::U8, Reduction::Max) => fold(into, from, u8::max),
        (ElementKind::I64, Reduction::Sum) => fold(into, from, i64::wrapping_add),
        (ElementKind::I64, Reduction::Max) => fold(into, from, i64::max),
        (ElementKind::F64, Reduction::Sum) => fold(into, from, |a: f64, b| a + b),
        (ElementKind::F64, Reduction::Max) => fold(into, from, f64::max),
        (ElementKind::F32, Reduction::Sum) => fold(into, from, |a: f32, b| a + b),
        (ElementKind::F32, Reduction::Max) => fold(into, from, f32::max),
        (ElementKind::Bf16, Reduction::Sum) => {
            fold(into, from, |a: bf16, b| bf16::from_f32(a.to_f32() + b.to_f32()));
        }
        (ElementKind::Bf16, Reduction::Max) => fold(into, from, |a: bf16, b| if b > a { b } else { a }),
    }
}
