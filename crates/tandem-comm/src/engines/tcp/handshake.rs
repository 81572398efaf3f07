//! Handshake: the first bytes of a connection, which name its group and ranks and prove that the
//! connecting process belongs to the job.
//!
//! There is no reply. A connection with another token, with other bytes or without any is closed.

use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::net::TcpStream;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use rustix::io::{Errno, retry_on_intr};
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage,
    SendFlags, recvmsg, sendmsg,
};

use super::socket::{Gone, Socket};

/// Bytes of a hello.
const HELLO: usize = 80;
const MAGIC: [u8; 8] = *b"TANDEM\x00\x01";
/// Bytes of a token.
pub(super) const TOKEN: usize = 32;
/// Time for a connection to say its hello, which is sent with the first packet.
const PATIENCE: Duration = Duration::from_secs(5);

/// Secret of a job that the store hands out.
pub(super) type Token = [u8; TOKEN];

/// Purpose of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Purpose {
    Collectives,
    Messages,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Hello {
    pub(super) group: u64,
    /// Rank in the group.
    pub(super) from: usize,
    pub(super) to: usize,
    pub(super) purpose: Purpose,
    /// Bytes of the ring in shared memory; 0 without.
    pub(super) capacity: usize,
}

impl Hello {
    fn encode(&self, token: &Token) -> [u8; HELLO] {
        let mut bytes = [0; HELLO];
        bytes[..8].copy_from_slice(&MAGIC);
        bytes[8..40].copy_from_slice(token);
        let purpose = u64::from(self.purpose == Purpose::Messages);
        let numbers = [self.group, self.from as u64, self.to as u64, purpose, self.capacity as u64];
        for (place, number) in bytes[40..].chunks_exact_mut(8).zip(numbers) {
            place.copy_from_slice(&number.to_le_bytes());
        }
        bytes
    }

    fn decode(bytes: &[u8; HELLO], token: &Token) -> Option<Self> {
        // Takes as long for every wrong token.
        let difference = bytes[8..40].iter().zip(token).fold(0, |all, (a, b)| all | (a ^ b));
        if bytes[..8] != MAGIC || difference != 0 {
            return None;
        }
        let number = |i: usize| {
            let place = 40 + 8 * i;
            u64::from_le_bytes(bytes[place..place + 8].try_into().expect("eight bytes"))
        };
        let purpose = match number(3) {
            0 => Purpose::Collectives,
            1 => Purpose::Messages,
            _ => return None,
        };
        let [from, to, capacity] = [1, 2, 4].map(|i| number(i) as usize);
        Some(Self { group: number(0), from, to, purpose, capacity })
    }

    /// Sends the hello, with the file of the shared memory if there is one.
    pub(super) fn send(&self, socket: &Socket, token: &Token, file: Option<&OwnedFd>) -> Result<(), Gone> {
        let bytes = self.encode(token);
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut attached = SendAncillaryBuffer::new(&mut space);
        let files = file.map(|file| [file.as_fd()]);
        if let Some(files) = &files
            && !attached.push(SendAncillaryMessage::ScmRights(files))
        {
            return Err(Gone);
        }
        // A new connection has room for it.
        let sent =
            retry_on_intr(|| sendmsg(socket, &[IoSlice::new(&bytes)], &mut attached, SendFlags::empty()));
        if sent == Ok(HELLO) { Ok(()) } else { Err(Gone) }
    }
}

/// Connection that has not said who it is.
pub(super) struct Stranger {
    socket: Socket,
    bytes: [u8; HELLO],
    arrived: usize,
    file: Option<OwnedFd>,
    since: Instant,
}

/// Next state of a stranger.
pub(super) enum Progress {
    /// The hello has not arrived in full.
    Waits(Stranger),
    /// A rank of the job.
    Known(Hello, Socket, Option<OwnedFd>),
    /// Not a rank of the job.
    Refused,
}

impl Stranger {
    pub(super) fn tcp(stream: TcpStream) -> Option<Self> {
        Socket::tcp(stream).ok().map(Self::new)
    }

    pub(super) fn unix(stream: UnixStream) -> Option<Self> {
        Socket::unix(stream).ok().map(Self::new)
    }

    fn new(socket: Socket) -> Self {
        Self { socket, bytes: [0; HELLO], arrived: 0, file: None, since: Instant::now() }
    }

    pub(super) fn age(&self) -> Duration {
        self.since.elapsed()
    }

    /// Reads what has arrived, never more than a hello.
    pub(super) fn advance(mut self, token: &Token) -> Progress {
        loop {
            let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
            let mut attached = RecvAncillaryBuffer::new(&mut space);
            let room = &mut [IoSliceMut::new(&mut self.bytes[self.arrived..])];
            let read =
                retry_on_intr(|| recvmsg(&self.socket, &mut *room, &mut attached, receive_closed_on_exec()));
            for message in attached.drain() {
                if let RecvAncillaryMessage::ScmRights(files) = message {
                    // Others are closed at once.
                    self.file = files.last();
                }
            }
            match read {
                Ok(read) if read.bytes > 0 => self.arrived += read.bytes,
                Err(Errno::AGAIN) if self.age() < PATIENCE => return Progress::Waits(self),
                _ => return Progress::Refused,
            }
            if self.arrived == HELLO {
                return match Hello::decode(&self.bytes, token) {
                    Some(hello) => Progress::Known(hello, self.socket, self.file),
                    None => Progress::Refused,
                };
            }
            // Other programs speak first too: the first bytes are enough to tell.
            let seen = self.arrived.min(MAGIC.len());
            if self.bytes[..seen] != MAGIC[..seen] {
                return Progress::Refused;
            }
        }
    }
}

impl AsFd for Stranger {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

/// Flags that keep a received file from programs that this process starts.
fn receive_closed_on_exec() -> RecvFlags {
    #[cfg(target_os = "linux")]
    return RecvFlags::CMSG_CLOEXEC;
    #[cfg(not(target_os = "linux"))]
    RecvFlags::empty()
}

#[cfg(test)]
mod tests {
    use super::*;

    const OWN: Token = [7; TOKEN];

    fn hello() -> Hello {
        Hello { group: u64::MAX, from: 3, to: 999, purpose: Purpose::Messages, capacity: 1 << 20 }
    }

    #[test]
    fn a_hello_is_read_as_it_was_written_and_only_with_the_token() {
        let mut bytes = hello().encode(&OWN);
        assert_eq!(Hello::decode(&bytes, &OWN), Some(hello()));
        assert_eq!(Hello::decode(&bytes, &[8; TOKEN]), None);
        bytes[0] = b'G';
        assert_eq!(Hello::decode(&bytes, &OWN), None);
    }

    #[test]
    fn a_hello_in_pieces_is_known_and_garbage_is_refused_at_its_first_byte() {
        use std::io::Write;

        let (mut ours, theirs) = UnixStream::pair().unwrap();
        let mut stranger = Stranger::unix(theirs).unwrap();
        let bytes = hello().encode(&OWN);
        for piece in [&bytes[..3], &bytes[3..50]] {
            ours.write_all(piece).unwrap();
            let Progress::Waits(same) = stranger.advance(&OWN) else { panic!("decided too early") };
            stranger = same;
        }
        ours.write_all(&bytes[50..]).unwrap();
        let Progress::Known(found, ..) = stranger.advance(&OWN) else { panic!("a rank was refused") };
        assert_eq!(found, hello());

        let (mut ours, theirs) = UnixStream::pair().unwrap();
        ours.write_all(b"G").unwrap();
        assert!(matches!(Stranger::unix(theirs).unwrap().advance(&OWN), Progress::Refused));
        let (ours, theirs) = UnixStream::pair().unwrap();
        drop(ours);
        assert!(matches!(Stranger::unix(theirs).unwrap().advance(&OWN), Progress::Refused));
    }
}
