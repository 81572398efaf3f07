//! Header of a frame: the call that the sender makes, in a chain with all calls before it.

use crate::collective::call_chain::Position;

/// Bytes of a header.
pub(super) const HEADER: usize = 64;

const MAGIC: u32 = 0x4d44_4e54;

/// Kind of a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Frame {
    /// Bytes of a call follow.
    Call,
    /// Nothing follows: the sender has waited long in its call and shows which it is.
    Probe,
    /// The sender has made all of its calls.
    Farewell,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Header {
    pub(super) frame: Frame,
    /// Place of the sender's call.
    pub(super) position: Position,
}

impl Header {
    pub(super) const FAREWELL: Self =
        Self { frame: Frame::Farewell, position: Position { number: 0, before: 0, hash: 0 } };

    pub(super) fn encode(&self) -> [u8; HEADER] {
        let frame = match self.frame {
            Frame::Call => 1u32,
            Frame::Probe => 2,
            Frame::Farewell => 3,
        };
        let mut bytes = [0; HEADER];
        bytes[..4].copy_from_slice(&MAGIC.to_le_bytes());
        bytes[4..8].copy_from_slice(&frame.to_le_bytes());
        let Position { number, before, hash } = self.position;
        for (i, number) in [number, before, hash].into_iter().enumerate() {
            bytes[8 + 8 * i..16 + 8 * i].copy_from_slice(&number.to_le_bytes());
        }
        bytes
    }

    /// Decodes a header; `None` for other bytes.
    pub(super) fn decode(bytes: &[u8; HEADER]) -> Option<Self> {
        let word = |at: usize| u32::from_le_bytes(bytes[at..at + 4].try_into().expect("four bytes"));
        let number = |at: usize| u64::from_le_bytes(bytes[at..at + 8].try_into().expect("eight bytes"));
        let frame = match (word(0), word(4)) {
            (MAGIC, 1) => Frame::Call,
            (MAGIC, 2) => Frame::Probe,
            (MAGIC, 3) => Frame::Farewell,
            _ => return None,
        };
        let position = Position { number: number(8), before: number(16), hash: number(24) };
        Some(Self { frame, position })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_header_is_read_as_it_was_written_and_other_bytes_are_none() {
        for frame in [Frame::Call, Frame::Probe, Frame::Farewell] {
            let header = Header { frame, position: Position { number: 7, before: u64::MAX, hash: 1 << 40 } };
            let mut bytes = header.encode();
            assert_eq!(Header::decode(&bytes), Some(header));
            bytes[0] ^= 1;
            assert_eq!(Header::decode(&bytes), None);
        }
        assert_eq!(Header::decode(&[0; HEADER]), None);
    }
}
