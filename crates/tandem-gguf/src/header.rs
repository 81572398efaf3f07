//! Header of a GGUF file: metadata and the places of tensors.

use std::collections::HashMap;
use std::io::{BufReader, Read};
use std::ops::Range;
use std::path::{Path, PathBuf};

use crate::quants::Quant;
use crate::{GgufError, Result};

/// Metadata value. Numbers are widened.
#[derive(Clone, Debug, PartialEq)]
pub enum Value {
    /// Integer of any width.
    Int(i128),
    /// Float of 32 bits.
    F32(f32),
    /// Float of 64 bits.
    F64(f64),
    /// Boolean.
    Bool(bool),
    /// Text.
    Text(String),
    /// Array of integers or booleans.
    Ints(Vec<i64>),
    /// Array of floats.
    Floats(Vec<f32>),
    /// Array of texts.
    Texts(Vec<String>),
}

impl Value {
    /// Returns the name of the value's type, for messages.
    pub fn kind(&self) -> &'static str {
        match self {
            Self::Int(_) => "an integer",
            Self::F32(_) | Self::F64(_) => "a float",
            Self::Bool(_) => "a boolean",
            Self::Text(_) => "a string",
            Self::Ints(_) => "an array of integers",
            Self::Floats(_) => "an array of floats",
            Self::Texts(_) => "an array of strings",
        }
    }
}

/// Tensor's type, shape and place.
#[derive(Clone, Debug, PartialEq)]
pub struct TensorInfo {
    /// Name in the file.
    pub name: String,
    /// Row-major shape, slowest dimension first: GGUF's dimensions in reverse.
    pub shape: Vec<usize>,
    /// Storage type.
    pub quant: Quant,
    /// Bytes in the file.
    pub bytes: Range<usize>,
}

/// Header of a GGUF file.
#[derive(Debug)]
pub struct Gguf {
    path: PathBuf,
    metadata: HashMap<String, Value>,
    tensors: Vec<TensorInfo>,
}

/// Largest number of elements of a metadata array: no vocabulary comes near.
const MAX_ARRAY: u64 = 1 << 24;

impl Gguf {
    /// Reads the header of a file.
    ///
    /// # Errors
    /// If the file is cut short, malformed, of another version or byte order, one part of several,
    /// or has a tensor of an unsupported type.
    pub fn open(path: &Path) -> Result<Self> {
        let file = tandem_files::open(path).map_err(|e| GgufError::io(path, e))?;
        let len = file.metadata().map_err(|e| GgufError::io(path, e))?.len();
        Self::read(path, BufReader::with_capacity(1 << 20, file), len)
    }

    fn read(path: &Path, inner: impl Read, len: u64) -> Result<Self> {
        let mut input = Input { inner, at: 0, len };
        let fail = |failure: Failure| match failure {
            Failure::Io(e) => GgufError::io(path, e),
            Failure::Reason(reason) => GgufError::format(path, reason),
        };
        let num_tensors = input.preamble().map_err(fail)?;
        let metadata = input.metadata().map_err(fail)?;
        let mut gguf = Self { path: path.to_owned(), metadata, tensors: Vec::new() };
        if gguf.int("split.count")?.is_some_and(|count| count > 1) {
            return Err(gguf.error(
                "is one part of a model in several files (split.count); join them with llama-gguf-split --merge",
            ));
        }
        let alignment = gguf.int("general.alignment")?.unwrap_or(32);
        if !alignment.is_power_of_two() || alignment > 1 << 20 {
            return Err(gguf.error(format!("general.alignment is {alignment}, expected a power of two")));
        }
        gguf.tensors = input.tensors(num_tensors, alignment).map_err(fail)?;
        Ok(gguf)
    }

    /// Returns the file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Returns every tensor, in the order of the file.
    pub fn tensors(&self) -> &[TensorInfo] {
        &self.tensors
    }

    /// Returns a tensor by its name in the file.
    pub fn tensor(&self, name: &str) -> Option<&TensorInfo> {
        self.tensors.iter().find(|tensor| tensor.name == name)
    }

    /// Returns a metadata value.
    pub fn value(&self, key: &str) -> Option<&Value> {
        self.metadata.get(key)
    }

    /// Makes an error about this file.
    pub(crate) fn error(&self, reason: impl Into<String>) -> GgufError {
        GgufError::format(&self.path, reason)
    }

    pub(crate) fn keys(&self) -> impl Iterator<Item = &str> {
        self.metadata.keys().map(String::as_str)
    }

    fn expected(&self, key: &str, what: &str, found: &Value) -> GgufError {
        self.error(format!("{key} is {}, expected {what}", found.kind()))
    }

    /// Returns a non-negative integer.
    pub(crate) fn int(&self, key: &str) -> Result<Option<u64>> {
        match self.value(key) {
            None => Ok(None),
            Some(Value::Int(n)) if (0..=i128::from(u64::MAX)).contains(n) => Ok(Some(*n as u64)),
            Some(Value::Int(n)) => Err(self.error(format!("{key} is {n}, expected a non-negative integer"))),
            Some(other) => Err(self.expected(key, "an integer", other)),
        }
    }

    /// Returns a finite number; of a 32-bit float, the shortest decimal that stands for it.
    pub(crate) fn number(&self, key: &str) -> Result<Option<f64>> {
        let number = match self.value(key) {
            None => return Ok(None),
            Some(Value::F32(x)) => x.to_string().parse().unwrap_or(f64::NAN),
            Some(Value::F64(x)) => *x,
            Some(Value::Int(n)) => *n as f64,
            Some(other) => return Err(self.expected(key, "a number", other)),
        };
        if !number.is_finite() {
            return Err(self.error(format!("{key} is {number}, expected a finite number")));
        }
        Ok(Some(number))
    }

    pub(crate) fn flag(&self, key: &str) -> Result<Option<bool>> {
        match self.value(key) {
            None => Ok(None),
            Some(Value::Bool(flag)) => Ok(Some(*flag)),
            Some(other) => Err(self.expected(key, "a boolean", other)),
        }
    }

    pub(crate) fn text(&self, key: &str) -> Result<Option<&str>> {
        match self.value(key) {
            None => Ok(None),
            Some(Value::Text(text)) => Ok(Some(text)),
            Some(other) => Err(self.expected(key, "a string", other)),
        }
    }

    pub(crate) fn texts(&self, key: &str) -> Result<Option<&[String]>> {
        match self.value(key) {
            None => Ok(None),
            Some(Value::Texts(texts)) => Ok(Some(texts)),
            Some(other) => Err(self.expected(key, "an array of strings", other)),
        }
    }

    pub(crate) fn floats(&self, key: &str) -> Result<Option<&[f32]>> {
        match self.value(key) {
            None => Ok(None),
            Some(Value::Floats(floats)) => Ok(Some(floats)),
            Some(other) => Err(self.expected(key, "an array of floats", other)),
        }
    }

    pub(crate) fn ints(&self, key: &str) -> Result<Option<&[i64]>> {
        match self.value(key) {
            None => Ok(None),
            Some(Value::Ints(ints)) => Ok(Some(ints)),
            Some(other) => Err(self.expected(key, "an array of integers", other)),
        }
    }
}

enum Failure {
    Io(std::io::Error),
    Reason(String),
}

impl From<String> for Failure {
    fn from(reason: String) -> Self {
        Self::Reason(reason)
    }
}

type Step<T> = std::result::Result<T, Failure>;

/// Reader that knows how many bytes are left.
struct Input<R> {
    inner: R,
    at: u64,
    len: u64,
}

impl<R: Read> Input<R> {
    /// Reads magic, version and number of tensors.
    fn preamble(&mut self) -> Step<u64> {
        let magic = self.array::<4>("magic")?;
        if &magic != b"GGUF" {
            return Err(format!("not a GGUF file: it begins with {magic:?}, expected \"GGUF\"").into());
        }
        let version = u32::from_le_bytes(self.array("version")?);
        match version {
            2 | 3 => {}
            _ if version & 0xffff == 0 => {
                return Err("is stored big-endian, which is not supported".to_owned().into());
            }
            _ => return Err(format!("is GGUF version {version}; versions 2 and 3 are read").into()),
        }
        self.u64("tensor count")
    }

    fn metadata(&mut self) -> Step<HashMap<String, Value>> {
        let count = self.u64("metadata count")?;
        // A key takes eight bytes of length, four of type and one of value at least.
        self.require(count.saturating_mul(13), "metadata keys", count)?;
        let mut metadata = HashMap::new();
        for _ in 0..count {
            let key = self.text("a metadata key")?;
            let kind = self.u32(&key)?;
            let value = self.value(&key, kind)?;
            if metadata.insert(key.clone(), value).is_some() {
                return Err(format!("metadata key {key} occurs twice").into());
            }
        }
        Ok(metadata)
    }

    fn value(&mut self, key: &str, kind: u32) -> Step<Value> {
        Ok(match kind {
            0..=5 | 10 | 11 => Value::Int(self.int(key, kind)?),
            6 => Value::F32(f32::from_le_bytes(self.array(key)?)),
            7 => Value::Bool(self.int(key, 0)? != 0),
            8 => Value::Text(self.text(key)?),
            9 => self.array_value(key)?,
            12 => Value::F64(f64::from_le_bytes(self.array(key)?)),
            _ => return Err(format!("metadata key {key} has unknown type {kind}").into()),
        })
    }

    fn array_value(&mut self, key: &str) -> Step<Value> {
        let kind = self.u32(key)?;
        let count = self.u64(key)?;
        let size = match kind {
            0 | 1 | 7 => 1,
            2 | 3 => 2,
            4..=6 => 4,
            8 | 10..=12 => 8,
            9 => {
                return Err(
                    format!("metadata key {key} is an array of arrays, which is not supported").into()
                );
            }
            _ => return Err(format!("metadata key {key} is an array of unknown type {kind}").into()),
        };
        self.require(count.saturating_mul(size), &format!("elements of {key}"), count)?;
        if count > MAX_ARRAY {
            return Err(
                format!("metadata key {key} has {count} elements; at most {MAX_ARRAY} are read").into()
            );
        }
        let range = 0..count;
        Ok(match kind {
            6 => Value::Floats(range.map(|_| Ok(f32::from_le_bytes(self.array(key)?))).collect::<Step<_>>()?),
            12 => Value::Floats(
                range.map(|_| Ok(f64::from_le_bytes(self.array(key)?) as f32)).collect::<Step<_>>()?,
            ),
            8 => Value::Texts(range.map(|_| self.text(key)).collect::<Step<_>>()?),
            _ => {
                let kind = if kind == 7 { 0 } else { kind };
                let int = |_| -> Step<i64> {
                    let int = self.int(key, kind)?;
                    i64::try_from(int).map_err(|_| format!("{key} holds {int}, which is too large").into())
                };
                Value::Ints(range.map(int).collect::<Step<_>>()?)
            }
        })
    }

    /// Reads an integer of GGUF's type `kind`.
    fn int(&mut self, what: &str, kind: u32) -> Step<i128> {
        Ok(match kind {
            0 => u8::from_le_bytes(self.array(what)?).into(),
            1 => i8::from_le_bytes(self.array(what)?).into(),
            2 => u16::from_le_bytes(self.array(what)?).into(),
            3 => i16::from_le_bytes(self.array(what)?).into(),
            4 => u32::from_le_bytes(self.array(what)?).into(),
            5 => i32::from_le_bytes(self.array(what)?).into(),
            10 => u64::from_le_bytes(self.array(what)?).into(),
            _ => i64::from_le_bytes(self.array(what)?).into(),
        })
    }

    fn tensors(&mut self, count: u64, alignment: u64) -> Step<Vec<TensorInfo>> {
        // Length of the name, number of dimensions, one dimension, type, offset.
        self.require(count.saturating_mul(32), "tensors", count)?;
        let mut found = Vec::new();
        let mut seen = std::collections::HashSet::new();
        for _ in 0..count {
            let name = self.text("a tensor's name")?;
            let num_dims = self.u32(&name)?;
            if !(1..=4).contains(&num_dims) {
                return Err(format!("tensor {name} has {num_dims} dimensions, expected 1 to 4").into());
            }
            let mut shape = (0..num_dims).map(|_| self.u64(&name)).collect::<Step<Vec<u64>>>()?;
            shape.reverse();
            let kind = self.u32(&name)?;
            let offset = self.u64(&name)?;
            let quant = Quant::from_id(kind).map_err(|reason| format!("tensor {name} is {reason}"))?;
            if !seen.insert(name.clone()) {
                return Err(format!("tensor {name} occurs twice").into());
            }
            found.push((name, shape, quant, offset));
        }
        let start = self.at.next_multiple_of(alignment);
        found
            .into_iter()
            .map(|tensor| self.place(tensor, start, alignment).map_err(Failure::Reason))
            .collect()
    }

    /// Returns the place of a tensor, whose offset counts from `start`.
    fn place(
        &self,
        (name, shape, quant, offset): (String, Vec<u64>, Quant, u64),
        start: u64,
        alignment: u64,
    ) -> std::result::Result<TensorInfo, String> {
        let (block, size) = (quant.block() as u64, quant.block_bytes() as u64);
        let row = shape.last().copied().unwrap_or(0);
        if shape.contains(&0) || !row.is_multiple_of(block) {
            return Err(format!(
                "tensor {name} is {shape:?}; rows of {quant} have a multiple of {block} elements"
            ));
        }
        if !offset.is_multiple_of(alignment) {
            return Err(format!(
                "tensor {name} starts at {offset}, no multiple of the alignment {alignment}"
            ));
        }
        let elements = shape.iter().try_fold(1u64, |n, &dim| n.checked_mul(dim));
        let end = elements
            .and_then(|n| (n / block).checked_mul(size))
            .and_then(|bytes| start.checked_add(offset)?.checked_add(bytes));
        let begin = start.saturating_add(offset);
        match end {
            Some(end) if end <= self.len => Ok(TensorInfo {
                name,
                shape: shape.into_iter().map(|dim| dim as usize).collect(),
                quant,
                bytes: begin as usize..end as usize,
            }),
            _ => Err(format!(
                "tensor {name} {shape:?} of {quant} at {begin} ends beyond the file's {} bytes; \
                 it was probably cut short while copying",
                self.len
            )),
        }
    }

    /// Refuses a count whose items take more bytes than are left.
    fn require(&self, bytes: u64, what: &str, count: u64) -> Step<()> {
        if bytes > self.len - self.at {
            return Err(format!(
                "announces {count} {what}, but has {} bytes left; it was probably cut short while copying",
                self.len - self.at
            )
            .into());
        }
        Ok(())
    }

    fn text(&mut self, what: &str) -> Step<String> {
        let length = self.u64(what)?;
        self.require(length, &format!("bytes of {what}"), length)?;
        let mut bytes = vec![0; length as usize];
        self.fill(&mut bytes, what)?;
        String::from_utf8(bytes).map_err(|_| format!("{what} holds text that is not UTF-8").into())
    }

    fn u32(&mut self, what: &str) -> Step<u32> {
        Ok(u32::from_le_bytes(self.array(what)?))
    }

    fn u64(&mut self, what: &str) -> Step<u64> {
        Ok(u64::from_le_bytes(self.array(what)?))
    }

    fn array<const N: usize>(&mut self, what: &str) -> Step<[u8; N]> {
        let mut bytes = [0; N];
        self.fill(&mut bytes, what)?;
        Ok(bytes)
    }

    fn fill(&mut self, bytes: &mut [u8], what: &str) -> Step<()> {
        if bytes.len() as u64 > self.len - self.at {
            return Err(format!(
                "the file has {} bytes and ends inside its header, at {what}; it was probably cut short while copying",
                self.len
            )
            .into());
        }
        self.inner.read_exact(bytes).map_err(Failure::Io)?;
        self.at += bytes.len() as u64;
        Ok(())
    }
}
