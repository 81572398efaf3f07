//! Wire protocol of a store: PyTorch's `TCPStore`.
//!
//! A request is an opcode (`u8`) and its arguments. Numbers are little-endian; keys and values are
//! a length (`u64`) and the bytes. Every connection begins with `Validate` and a magic number.
//! Clients prepend `/` to keys, so that they and PyTorch's see each other's.
//!
//! | request | arguments | reply |
//! |---|---|---|
//! | `Validate` | `u32` magic | none |
//! | `Set`, `Append` | key, value | none |
//! | `CompareSet` | key, expected value, new value | value that the key has now |
//! | `Get` | key, which exists | value |
//! | `Add` | key, `i64` | `i64`, the sum; it is kept in decimal digits |
//! | `Check` | `u64` count, keys | `u8`: 0 all exist, 1 not |
//! | `Wait` | `u64` count, keys | `u8` 0, when all exist |
//! | `CancelWait` | | `u8` 1, unless the wait's own reply came first: then both come |
//! | `NumKeys` | | `i64` |
//! | `Delete` | key | `i64`, how many were deleted |
//! | `MultiGet` | `u64` count, keys, which exist | values |
//! | `MultiSet` | `u64` count, keys and values in turn | none |
//! | `Ping` | `u32` | the same |

use std::io::{self, ErrorKind, Read};

/// Magic number of `Validate`.
pub(super) const MAGIC: u32 = 0x3C85_F7CE;
/// Maximum bytes of a key. This limit and the next two are PyTorch's.
pub(super) const MAX_KEY: u64 = 8 << 10;
pub(super) const MAX_VALUE: u64 = 8 << 20;
pub(super) const MAX_KEYS: u64 = 128 << 10;

/// Reply to a finished wait, and to a check whose keys all exist.
pub(super) const READY: u8 = 0;
/// Reply to a cancelled wait, and to a check with missing keys.
pub(super) const NOT_READY: u8 = 1;

macro_rules! opcodes {
    ($($name:ident = $byte:literal),* $(,)?) => {
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub(super) enum Opcode {
            $($name = $byte),*
        }

        impl Opcode {
            pub(super) fn from_byte(byte: u8) -> Option<Self> {
                match byte {
                    $($byte => Some(Self::$name),)*
                    _ => None,
                }
            }
        }
    };
}

opcodes! {
    Validate = 0,
    Set = 1,
    CompareSet = 2,
    Get = 3,
    Add = 4,
    Check = 5,
    Wait = 6,
    NumKeys = 7,
    Delete = 8,
    Append = 9,
    MultiGet = 10,
    MultiSet = 11,
    CancelWait = 12,
    Ping = 13,
}

/// Builder of a request or reply, sent at once: a packet per field would wait for acknowledgements.
#[derive(Default)]
pub(super) struct Message(Vec<u8>);

impl Message {
    pub(super) fn request(opcode: Opcode) -> Self {
        Self(vec![opcode as u8])
    }

    pub(super) fn number<const N: usize>(mut self, little_endian: [u8; N]) -> Self {
        self.0.extend(little_endian);
        self
    }

    pub(super) fn bytes(mut self, bytes: &[u8]) -> Self {
        self.0.extend((bytes.len() as u64).to_le_bytes());
        self.0.extend(bytes);
        self
    }

    pub(super) fn as_bytes(&self) -> &[u8] {
        &self.0
    }
}

pub(super) fn read_number<const N: usize>(from: &mut impl Read) -> io::Result<[u8; N]> {
    let mut bytes = [0; N];
    from.read_exact(&mut bytes)?;
    Ok(bytes)
}

/// Reads a key or value. A length beyond `limit` fails before anything is read.
pub(super) fn read_bytes(from: &mut impl Read, limit: u64) -> io::Result<Vec<u8>> {
    let len = u64::from_le_bytes(read_number(from)?);
    if len > limit {
        return Err(invalid(format!("a length of {len} bytes, at most {limit} are allowed")));
    }
    let mut bytes = Vec::new();
    // The buffer grows with the received bytes, not with the announced length.
    if from.take(len).read_to_end(&mut bytes)? as u64 != len {
        return Err(ErrorKind::UnexpectedEof.into());
    }
    Ok(bytes)
}

/// Reads a number of keys.
pub(super) fn read_count(from: &mut impl Read) -> io::Result<u64> {
    let count = u64::from_le_bytes(read_number(from)?);
    if count > MAX_KEYS {
        return Err(invalid(format!("{count} keys in one request, at most {MAX_KEYS} are allowed")));
    }
    Ok(count)
}

/// Creates the error of a broken protocol.
pub(super) fn invalid(what: String) -> io::Error {
    io::Error::new(ErrorKind::InvalidData, what)
}
