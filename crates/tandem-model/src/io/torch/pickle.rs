//! Pickle interpreter that can build nothing but tensors, containers, numbers and strings.
//!
//! Opcodes and their meaning: `pickletools` of CPython. A `GLOBAL` outside the short list below is
//! refused by name; nothing here could call it. Memory and time are bounded by the pickle's length, which
//! has a limit: what a memo gives many times is shared, or bounded where it is copied.

use std::rc::Rc;

/// Value on the interpreter's stack.
#[derive(Clone, Debug)]
pub(super) enum Value {
    /// Ignored values: None, floats, booleans.
    Plain,
    Int(i64),
    Str(Rc<str>),
    Tuple(Rc<Tuple>),
    /// Index into the machine's dictionaries, which the memo shares.
    Dict(usize),
    List,
    Global(Global),
    Storage(Rc<Storage>),
    Tensor(Rc<PickledTensor>),
    /// Dictionary with its contents, in the result only.
    Finished(Rc<Vec<(String, Value)>>),
}

#[derive(Debug)]
pub(super) struct Tuple {
    items: Vec<Value>,
    /// Tuples that are within one another here.
    depth: usize,
}

/// Longest pickle that is read. The state dict of a model takes some hundred bytes a tensor.
const MAX_LENGTH: usize = 8 << 20;

/// Tuples within one another. A state dict needs two; a deep pile would overflow the stack when dropped.
const MAX_DEPTH: usize = 64;

/// Dimensions of a tensor.
const MAX_DIMENSIONS: usize = 16;

/// Bytes of a storage's name.
const MAX_NAME: usize = 256;

/// Raw storage of the zip.
#[derive(Debug)]
pub(super) struct Storage {
    kind: String,
    key: String,
}

/// Tensor as a part of a storage.
#[derive(Debug)]
pub(super) struct PickledTensor {
    pub(super) storage_type: String,
    pub(super) storage: String,
    pub(super) offset: usize,
    pub(super) shape: Vec<usize>,
    pub(super) stride: Vec<usize>,
}

/// Globals that a pickle may name.
#[derive(Clone, Debug)]
pub(super) enum Global {
    RebuildTensor,
    RebuildParameter,
    OrderedDict,
    StorageType(Rc<str>),
}

impl Value {
    /// Returns the entries of a dictionary with string keys.
    pub(super) fn as_dict(&self) -> Option<&[(String, Value)]> {
        match self {
            Self::Finished(entries) => Some(entries),
            _ => None,
        }
    }
}

#[derive(Default)]
struct Machine<'a> {
    code: &'a [u8],
    stack: Vec<Value>,
    marks: Vec<usize>,
    memo: Vec<Option<Value>>,
    dicts: Vec<Vec<(Value, Value)>>,
    /// Bytes of the whole pickle.
    length: usize,
}

pub(super) fn load(code: &[u8]) -> Result<Value, String> {
    if code.len() > MAX_LENGTH {
        let limit = MAX_LENGTH >> 20;
        return Err(format!(
            "the pickle has {} bytes, at most {limit} MiB are read: save the model's state_dict() alone",
            code.len()
        ));
    }
    let mut machine = Machine { code, length: code.len(), ..Machine::default() };
    let result = machine.run()?;
    // Entries and their names are in the pickle once each, unless a memo repeats them.
    machine.finish(&result, 0, &mut (2 * code.len()))
}

type Step = Result<(), String>;

impl<'a> Machine<'a> {
    fn run(&mut self) -> Result<Value, String> {
        loop {
            let opcode = self.take(1)?[0];
            match opcode {
                b'.' => return self.pop(),
                0x80 => _ = self.take(1)?,
                0x95 => _ = self.take(8)?,
                b'(' => self.marks.push(self.stack.len()),
                b'c' => self.global()?,
                0x93 => self.stack_global()?,
                b'R' => self.reduce()?,
                b'Q' => self.persistent()?,
                b'b' => _ = self.pop()?,
                b'0' => _ = self.pop()?,
                b'q' | b'h' | b'r' | b'j' | 0x94 => self.memo(opcode)?,
                b')' | b't' | 0x85..=0x87 => self.tuple(opcode)?,
                b'}' | b']' | b's' | b'u' | b'a' | b'e' => self.container(opcode)?,
                _ => self.scalar(opcode)?,
            }
        }
    }

    fn scalar(&mut self, opcode: u8) -> Step {
        let value = match opcode {
            b'N' | 0x88 | 0x89 => Value::Plain,
            b'G' => {
                self.take(8)?;
                Value::Plain
            }
            b'K' => Value::Int(i64::from(self.take(1)?[0])),
            b'M' => Value::Int(self.integer(2)?),
            // The only signed integer opcode.
            b'J' => Value::Int(i64::from(self.integer(4)? as i32)),
            0x8a => {
                let length = self.take(1)?[0];
                self.long(usize::from(length))?
            }
            b'X' => self.string(4)?,
            0x8c => self.string(1)?,
            0x8d => self.string(8)?,
            // Byte strings, which numpy scalars in metrics bring; nothing reads them.
            b'C' | b'U' => {
                self.string(1)?;
                Value::Plain
            }
            b'B' | b'T' => {
                self.string(4)?;
                Value::Plain
            }
            other => {
                return Err(format!("the pickle uses opcode {other:#04x}, which state dicts do not need"));
            }
        };
        self.stack.push(value);
        Ok(())
    }

    fn memo(&mut self, opcode: u8) -> Step {
        let index = match opcode {
            b'q' | b'h' => usize::from(self.take(1)?[0]),
            b'r' | b'j' => self.integer(4)? as usize,
            _ => self.memo.len(),
        };
        if matches!(opcode, b'h' | b'j') {
            let value = self.memo.get(index).cloned().flatten();
            self.stack.push(value.ok_or("the pickle reads a memo that it never wrote")?);
            return Ok(());
        }
        // A write takes two bytes or more: keeps a hostile index from taking memory.
        if index > self.length / 2 {
            return Err("the pickle writes a memo far beyond its size".into());
        }
        if index >= self.memo.len() {
            self.memo.resize(index + 1, None);
        }
        self.memo[index] = Some(self.stack.last().cloned().ok_or("the pickle's stack is empty")?);
        Ok(())
    }

    fn tuple(&mut self, opcode: u8) -> Step {
        let items = match opcode {
            b')' => Vec::new(),
            b't' => self.pop_mark()?,
            _ => {
                let count = usize::from(opcode - 0x84);
                let start = self.stack.len().checked_sub(count).ok_or("the pickle's stack is empty")?;
                self.stack.split_off(start)
            }
        };
        let depth_of = |item: &Value| if let Value::Tuple(tuple) = item { tuple.depth } else { 0 };
        let depth = 1 + items.iter().map(depth_of).max().unwrap_or(0);
        if depth > MAX_DEPTH {
            return Err(format!("the pickle has more than {MAX_DEPTH} tuples within one another"));
        }
        self.stack.push(Value::Tuple(Rc::new(Tuple { items, depth })));
        Ok(())
    }

    fn container(&mut self, opcode: u8) -> Step {
        match opcode {
            b'}' => self.new_dict(),
            b']' => self.stack.push(Value::List),
            b's' => {
                let (value, key) = (self.pop()?, self.pop()?);
                self.extend_dict(vec![key, value])?;
            }
            b'u' => {
                let items = self.pop_mark()?;
                self.extend_dict(items)?;
            }
            // Lists hold metrics, never tensors of a state dict: their contents are dropped.
            b'a' => _ = self.pop()?,
            _ => _ = self.pop_mark()?,
        }
        Ok(())
    }

    fn new_dict(&mut self) {
        self.stack.push(Value::Dict(self.dicts.len()));
        self.dicts.push(Vec::new());
    }

    fn extend_dict(&mut self, items: Vec<Value>) -> Step {
        let Some(Value::Dict(index)) = self.stack.last() else {
            return Err("the pickle sets items of something that is no dictionary".into());
        };
        let dict = &mut self.dicts[*index];
        let mut items = items.into_iter();
        while let (Some(key), Some(value)) = (items.next(), items.next()) {
            dict.push((key, value));
        }
        Ok(())
    }

    fn global(&mut self) -> Step {
        let (module, name) = (self.line()?, self.line()?);
        self.push_global(&module, &name)
    }

    fn stack_global(&mut self) -> Step {
        match (self.pop()?, self.pop()?) {
            (Value::Str(name), Value::Str(module)) => self.push_global(&module, &name),
            _ => Err("the pickle names a global by something other than strings".into()),
        }
    }

    fn push_global(&mut self, module: &str, name: &str) -> Step {
        let global = match (module, name) {
            ("torch._utils", "_rebuild_tensor_v2") => Global::RebuildTensor,
            ("torch._utils", "_rebuild_parameter") => Global::RebuildParameter,
            ("collections", "OrderedDict") => Global::OrderedDict,
            ("torch", name) if name.ends_with("Storage") => Global::StorageType(name.into()),
            _ => {
                return Err(format!(
                    "the pickle asks for {module}.{name}; only tensors, containers, numbers and strings are read. \
                     Save the model's state_dict() alone"
                ));
            }
        };
        self.stack.push(Value::Global(global));
        Ok(())
    }

    fn reduce(&mut self) -> Step {
        let (arguments, function) = (self.pop()?, self.pop()?);
        let (Value::Tuple(arguments), Value::Global(global)) = (arguments, function) else {
            return Err("the pickle calls something that is not a known global".into());
        };
        let arguments = &arguments.items;
        match global {
            Global::OrderedDict if arguments.is_empty() => self.new_dict(),
            Global::RebuildTensor => self.stack.push(Value::Tensor(Rc::new(tensor(arguments)?))),
            Global::RebuildParameter => {
                self.stack.push(arguments.first().cloned().ok_or("the pickle holds an empty parameter")?);
            }
            _ => return Err(format!("the pickle calls {global:?} with {} arguments", arguments.len())),
        }
        Ok(())
    }

    /// Reads a reference `("storage", type, key, device, count)`.
    fn persistent(&mut self) -> Step {
        if let Value::Tuple(tuple) = self.pop()?
            && let [_, Value::Global(Global::StorageType(kind)), Value::Str(key), ..] = &*tuple.items
            && kind.len() + key.len() <= MAX_NAME
        {
            let storage = Storage { kind: kind.to_string(), key: key.to_string() };
            self.stack.push(Value::Storage(Rc::new(storage)));
            return Ok(());
        }
        Err("the pickle refers to something outside that is no storage".into())
    }

    fn pop(&mut self) -> Result<Value, String> {
        self.stack.pop().ok_or_else(|| "the pickle's stack is empty".into())
    }

    fn pop_mark(&mut self) -> Result<Vec<Value>, String> {
        let start = self.marks.pop().filter(|&m| m <= self.stack.len());
        Ok(self.stack.split_off(start.ok_or("the pickle closes something that it never opened")?))
    }

    fn take(&mut self, count: usize) -> Result<&'a [u8], String> {
        let (taken, rest) = self.code.split_at_checked(count).ok_or("the pickle is cut short")?;
        self.code = rest;
        Ok(taken)
    }

    fn integer(&mut self, bytes: usize) -> Result<i64, String> {
        Ok(self.take(bytes)?.iter().rev().fold(0, |n, &b| n << 8 | i64::from(b)))
    }

    /// Reads a little-endian two's-complement integer; one of more than 64 bits is ignored.
    fn long(&mut self, bytes: usize) -> Result<Value, String> {
        let digits = self.take(bytes)?;
        if bytes > 8 {
            return Ok(Value::Plain);
        }
        let negative = digits.last().is_some_and(|d| d & 0x80 != 0);
        let start = if negative { -1 } else { 0 };
        Ok(Value::Int(digits.iter().rev().fold(start, |n, &b| n << 8 | i64::from(b))))
    }

    fn string(&mut self, length_bytes: usize) -> Result<Value, String> {
        let length = usize::try_from(self.integer(length_bytes)?).map_err(|_| "the pickle is cut short")?;
        Ok(Value::Str(String::from_utf8_lossy(self.take(length)?).into()))
    }

    fn line(&mut self) -> Result<String, String> {
        let end = self.code.iter().position(|&b| b == b'\n').ok_or("the pickle is cut short")?;
        let line = String::from_utf8_lossy(self.take(end)?).into_owned();
        self.take(1)?;
        Ok(line)
    }

    /// Resolves dictionaries to the depth of `{"state": {…}}`; deeper ones (`_metadata`) hold no
    /// tensors.
    fn finish(&self, value: &Value, depth: usize, left: &mut usize) -> Result<Value, String> {
        let Value::Dict(index) = value else { return Ok(value.clone()) };
        if depth == 2 {
            return Ok(Value::Plain);
        }
        let mut entries = Vec::new();
        for (key, value) in &self.dicts[*index] {
            let Value::Str(key) = key else { continue };
            *left = left
                .checked_sub(1 + key.len())
                .ok_or("the pickle repeats dictionaries or their keys: it is no state dict")?;
            entries.push((key.to_string(), self.finish(value, depth + 1, left)?));
        }
        Ok(Value::Finished(Rc::new(entries)))
    }
}

/// Makes a tensor from `(storage, offset, shape, stride, …)`.
fn tensor(arguments: &[Value]) -> Result<PickledTensor, String> {
    let sizes = |value: &Value| match value {
        Value::Tuple(tuple) if tuple.items.len() <= MAX_DIMENSIONS => {
            tuple.items.iter().map(size).collect::<Option<Vec<usize>>>()
        }
        _ => None,
    };
    if let [Value::Storage(storage), offset, shape, stride, ..] = arguments
        && let (Some(offset), Some(shape), Some(stride)) = (size(offset), sizes(shape), sizes(stride))
        && shape.len() == stride.len()
    {
        let Storage { kind, key } = &**storage;
        return Ok(PickledTensor { storage_type: kind.clone(), storage: key.clone(), offset, shape, stride });
    }
    Err("the pickle builds a tensor from something other than a storage".into())
}

fn size(value: &Value) -> Option<usize> {
    match value {
        Value::Int(n) => usize::try_from(*n).ok(),
        _ => None,
    }
}
