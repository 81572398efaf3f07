//! Flow of a call: bytes leave through one link while others arrive through another.
//!
//! Bytes move in pieces that stay in the cache. An outgoing piece may depend on an incoming one
//! that it forwards: it leaves as soon as that one has arrived and is reduced.

use std::ops::Range;
use std::time::Instant;

use super::Fault;
use super::header::{Frame, Header};
use super::wire::Wire;
use crate::collective::element::{ElementKind, Reduction};

/// Bytes that move at once, a multiple of every element's size.
pub(super) const PIECE: usize = 128 << 10;

/// Ranges of a buffer that leave and arrive, in order. Both sides of a link know their lengths.
pub(super) struct Flow<'a> {
    pub(super) kind: ElementKind,
    /// The receiver, and the ranges for it.
    pub(super) to: Option<(usize, &'a [Range<usize>])>,
    /// The sender, and the ranges from it.
    pub(super) from: Option<(usize, &'a [Range<usize>])>,
    /// Reduction of the first incoming ranges, and their number; the others are copied.
    pub(super) reduces: Option<(Reduction, usize)>,
    /// Outgoing range `i + lag` is incoming range `i`.
    pub(super) forwards: Option<usize>,
}

/// Position in a list of ranges.
#[derive(Clone, Copy, Default)]
struct Cursor {
    range: usize,
    offset: usize,
}

impl Cursor {
    fn skip_finished(&mut self, ranges: &[Range<usize>]) {
        while ranges.get(self.range).is_some_and(|range| self.offset == range.len()) {
            *self = Self { range: self.range + 1, offset: 0 };
        }
    }
}

/// Progress of a flow.
struct Progress {
    sent: Cursor,
    arrived: Cursor,
    /// Place of the incoming link, once it is there.
    input: Option<usize>,
    /// Whether the incoming frame has begun.
    is_begun: bool,
    has_sent_all: bool,
    has_received_all: bool,
    /// Whether the outgoing link is full.
    is_full: bool,
}

impl Wire {
    /// Runs a flow on `data`. `room` takes elements that are reduced.
    pub(super) fn flow(&mut self, flow: &Flow<'_>, data: &mut [u8], room: &mut [u64]) -> Result<(), Fault> {
        self.begin();
        let output = flow.to.map(|(peer, _)| self.out_link(peer)).transpose()?;
        if let Some(i) = output {
            self.end_header(i)?;
            let header = Header { frame: Frame::Call, position: self.chain.position() };
            self.outs[i].begin(&header);
        }
        let mut progress = Progress {
            sent: Cursor::default(),
            arrived: Cursor::default(),
            input: None,
            is_begun: false,
            has_sent_all: output.is_none(),
            has_received_all: flow.from.is_none(),
            is_full: false,
        };
        loop {
            let mut moved = false;
            if let Some(i) = output.filter(|_| !progress.has_sent_all) {
                moved |= self.push(flow, i, data, &mut progress)?;
            }
            if let Some((peer, ranges)) = flow.from.filter(|_| !progress.has_received_all) {
                moved |= self.pull(flow, (peer, ranges), data, room, &mut progress)?;
            }
            if progress.has_sent_all && progress.has_received_all {
                return Ok(());
            }
            if moved {
                self.since = Instant::now();
                continue;
            }
            let full = output.filter(|_| progress.is_full);
            let input = progress.input.filter(|_| !progress.has_received_all);
            let awaited = match flow.from {
                Some((peer, _)) if !progress.has_received_all => peer,
                _ => flow.to.map_or(self.member.rank, |(peer, _)| peer),
            };
            self.wait(input, full, awaited)?;
        }
    }

    /// Sends the rest of a probe.
    fn end_header(&mut self, i: usize) -> Result<(), Fault> {
        let peer = self.outs[i].connection.peer;
        while !self.outs[i].is_header_sent() {
            self.outs[i].write(&[], 1).map_err(|_| Fault::Gone(peer))?;
            if !self.outs[i].is_header_sent() {
                self.wait(None, Some(i), peer)?;
            }
        }
        Ok(())
    }

    /// Sends a piece; returns whether anything moved.
    fn push(
        &mut self,
        flow: &Flow<'_>,
        i: usize,
        data: &[u8],
        progress: &mut Progress,
    ) -> Result<bool, Fault> {
        let Some((peer, ranges)) = flow.to else { return Ok(false) };
        let link = &mut self.outs[i];
        let gone = |_| Fault::Gone(peer);
        let had_header = link.is_header_sent();
        progress.sent.skip_finished(ranges);
        let Cursor { range: at, offset } = progress.sent;
        let piece = match ranges.get(at) {
            Some(range) => range.start + offset..range.start + allowed(flow, range, at, progress.arrived),
            None => 0..0,
        };
        let piece = piece.start..piece.end.min(piece.start + PIECE);
        if piece.is_empty() && had_header {
            progress.is_full = false;
            if at == ranges.len() {
                link.end().map_err(gone)?;
                progress.has_sent_all = true;
                return Ok(true);
            }
            return Ok(false);
        }
        let sent = link.write(&data[piece.clone()], flow.kind.size()).map_err(gone)?;
        progress.sent.offset += sent;
        progress.is_full = sent < piece.len() || !link.is_header_sent();
        Ok(sent > 0 || !had_header && link.is_header_sent())
    }

    /// Receives a piece; returns whether anything moved.
    fn pull(
        &mut self,
        flow: &Flow<'_>,
        (peer, ranges): (usize, &[Range<usize>]),
        data: &mut [u8],
        room: &mut [u64],
        progress: &mut Progress,
    ) -> Result<bool, Fault> {
        if progress.input.is_none() {
            progress.input = self.in_link(peer)?;
        }
        let Some(i) = progress.input else { return Ok(false) };
        let mut moved = false;
        if !progress.is_begun {
            progress.is_begun = self.has_frame(i)?;
            moved = progress.is_begun;
            if !moved {
                return Ok(false);
            }
        }
        let (link, gone) = (&mut self.ins[i], |_| Fault::Gone(peer));
        progress.arrived.skip_finished(ranges);
        let Cursor { range: at, offset } = progress.arrived;
        let Some(range) = ranges.get(at) else {
            link.end().map_err(gone)?;
            progress.has_received_all = true;
            return Ok(true);
        };
        let start = range.start + offset;
        let place = &mut data[start..range.end.min(start + PIECE)];
        let arrived = match flow.reduces {
            Some((reduction, num)) if at < num => link.reduce(place, flow.kind, reduction, room),
            _ => link.read(place, flow.kind.size()),
        };
        let arrived = arrived.map_err(gone)?;
        progress.arrived.offset += arrived;
        Ok(moved || arrived > 0)
    }
}

/// Returns how much of an outgoing range may be sent.
fn allowed(flow: &Flow<'_>, range: &Range<usize>, at: usize, arrived: Cursor) -> usize {
    let Some(source) = flow.forwards.map(|lag| at.checked_sub(lag)) else { return range.len() };
    match source {
        Some(source) if source == arrived.range => arrived.offset,
        Some(source) if source > arrived.range => 0,
        _ => range.len(),
    }
}
