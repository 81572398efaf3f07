//! Node: what one process shares among all of its groups. One thread polls all sockets.
//!
//! The thread accepts connections, notices the end of any, and sends messages that did not fit. It
//! sleeps while collectives run: bytes of a collective are moved by the thread that makes the call,
//! which needs no switch of threads for them.

use std::collections::HashSet;
use std::net::TcpListener;
use std::os::fd::AsFd;
use std::os::unix::net::UnixListener;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::thread::JoinHandle;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::address_book::AddressBook;
use super::handshake::{Hello, Progress, Purpose, Stranger, Token};
use super::link::Connection;
use super::member::Member;
use super::memory::{SharedMemory, Side};
use super::socket::Socket;
use crate::health::wake::Wake;

/// Maximum number of connections that have not said who they are.
const MAX_STRANGERS: usize = 256;
/// Age of a stranger that makes room for another when there are too many.
const OLD: Duration = Duration::from_millis(500);
/// Interval of looking at strangers, and of accepting when the process has no descriptors left.
const PAUSE: Duration = Duration::from_millis(100);
/// Maximum number of connections for groups that this rank has not made yet.
const MAX_EARLY: usize = 4096;

pub(super) struct Node {
    pub(super) shared: Arc<NodeShared>,
    thread: Option<JoinHandle<()>>,
}

pub(super) struct NodeShared {
    pub(super) token: Token,
    pub(super) addresses: AddressBook,
    wake: Wake,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    groups: Vec<(u64, Weak<Member>)>,
    /// Groups that this rank has left.
    ended: HashSet<u64>,
    /// Connections for groups that this rank has not made yet.
    early: Vec<(Hello, Connection)>,
    /// Connections that the thread does not poll yet.
    new: Vec<Watched>,
    closing: bool,
}

/// Connection of which the thread notices the end.
struct Watched {
    connection: Arc<Connection>,
    member: Weak<Member>,
}

impl Node {
    /// Starts the thread.
    pub(super) fn start(
        token: Token,
        addresses: AddressBook,
        tcp: TcpListener,
        unix: Option<UnixListener>,
    ) -> std::io::Result<Self> {
        tcp.set_nonblocking(true)?;
        if let Some(unix) = &unix {
            unix.set_nonblocking(true)?;
        }
        let shared = Arc::new(NodeShared { token, addresses, wake: Wake::new()?, state: Mutex::default() });
        let poller = Poller { shared: shared.clone(), tcp, unix, strangers: Vec::new(), watched: Vec::new() };
        let thread = std::thread::Builder::new().name("ranks".to_owned()).spawn(move || poller.run())?;
        Ok(Self { shared, thread: Some(thread) })
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        self.shared.lock().closing = true;
        self.shared.wake.wake();
        if let Some(thread) = self.thread.take() {
            // The thread has no panics to report.
            let _ = thread.join();
        }
    }
}

impl NodeShared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Accepts connections for a group from now on, and those that came before.
    pub(super) fn enter(&self, member: &Arc<Member>) {
        let mut state = self.lock();
        state.groups.push((member.id, Arc::downgrade(member)));
        let (here, elsewhere) =
            std::mem::take(&mut state.early).into_iter().partition(|(hello, _)| hello.group == member.id);
        state.early = elsewhere;
        for (hello, connection) in here {
            state.deliver(member, &hello, connection);
        }
        self.wake.wake();
    }

    /// Accepts no more connections for a group.
    pub(super) fn leave(&self, id: u64) {
        let mut state = self.lock();
        state.groups.retain(|(other, _)| *other != id);
        state.ended.insert(id);
    }

    /// Watches a connection that this rank has made.
    pub(super) fn watch(&self, connection: Arc<Connection>, member: &Arc<Member>) {
        member.keep(&connection);
        self.lock().new.push(Watched { connection, member: Arc::downgrade(member) });
        self.wake.wake();
    }

    /// Sends the messages that are left over when there is room.
    pub(super) fn send_later(&self) {
        self.wake.wake();
    }

    fn admit(&self, hello: &Hello, socket: Socket, file: Option<&std::os::fd::OwnedFd>) {
        let memory = file.and_then(|file| SharedMemory::open(file, hello.capacity));
        if memory.is_some() != (hello.capacity > 0) {
            // This rank cannot map the memory; the other one notices the end of the connection.
            return;
        }
        let connection = Connection { peer: hello.from, side: Side::Reader, socket, memory };
        let mut state = self.lock();
        let group = state.groups.iter().find(|(id, _)| *id == hello.group);
        match group.map(|(_, member)| member.upgrade()) {
            Some(Some(member)) => state.deliver(&member, hello, connection),
            Some(None) => connection.leave(),
            None if state.ended.contains(&hello.group) => connection.leave(),
            None if state.early.len() < MAX_EARLY => state.early.push((*hello, connection)),
            None => {}
        }
    }
}

impl State {
    fn deliver(&mut self, member: &Arc<Member>, hello: &Hello, connection: Connection) {
        if hello.to != member.rank || hello.from >= member.size() {
            return;
        }
        let connection = Arc::new(connection);
        member.arrive(hello.purpose, connection.clone());
        self.new.push(Watched { connection, member: Arc::downgrade(member) });
    }
}

/// The thread.
struct Poller {
    shared: Arc<NodeShared>,
    tcp: TcpListener,
    unix: Option<UnixListener>,
    strangers: Vec<Stranger>,
    watched: Vec<Watched>,
}

/// Results of a poll.
struct Ready {
    /// Places in `watched` of connections that have ended.
    ended: Vec<usize>,
    accepts: bool,
    has_room: bool,
}

impl Poller {
    fn run(mut self) {
        loop {
            let members: Vec<Arc<Member>> = {
                let mut state = self.shared.lock();
                if state.closing {
                    break;
                }
                self.watched.append(&mut state.new);
                state.groups.iter().filter_map(|(_, member)| member.upgrade()).collect()
            };
            let ready = self.poll(&members);
            if ready.has_room {
                members.iter().for_each(|member| member.outbox.flush());
            }
            // Dropped before the next poll: the last owner of a group must not be this thread.
            drop(members);
            // A rank connects before it leaves: what it sent is taken in before its end.
            if ready.accepts || !ready.ended.is_empty() {
                self.accept();
            }
            self.advance();
            for &i in ready.ended.iter().rev() {
                bury(&self.watched.swap_remove(i));
            }
        }
        // A rank that has just connected learns that this one has left, and is not lost.
        self.accept();
        self.advance();
    }

    fn poll(&self, members: &[Arc<Member>]) -> Ready {
        let mut full = Vec::new();
        members.iter().for_each(|member| member.outbox.full_connections(|c| full.push(c.clone())));
        let mut fds = vec![PollFd::new(&self.shared.wake, PollFlags::IN)];
        let is_crowded = self.strangers.len() >= MAX_STRANGERS;
        let listen = if is_crowded { PollFlags::empty() } else { PollFlags::IN };
        fds.push(PollFd::new(&self.tcp, listen));
        fds.extend(self.unix.iter().map(|unix| PollFd::new(unix, listen)));
        let num_listeners = fds.len() - 1;
        fds.extend(
            self.strangers.iter().map(|stranger| PollFd::from_borrowed_fd(stranger.as_fd(), PollFlags::IN)),
        );
        let first_watched = fds.len();
        fds.extend(self.watched.iter().map(|watched| PollFd::new(&*watched.connection, end_of_connection())));
        let first_full = fds.len();
        fds.extend(full.iter().map(|connection| PollFd::new(&**connection, PollFlags::OUT)));
        let timeout = (!self.strangers.is_empty()).then(|| Timespec::try_from(PAUSE).expect("a short time"));
        // After an interruption nothing is ready, and the next poll follows.
        let _ = poll(&mut fds, timeout.as_ref());
        self.shared.wake.clear();
        let is_ready = |fd: &PollFd| !fd.revents().is_empty();
        let watched = fds[first_watched..first_full].iter().enumerate();
        Ready {
            ended: watched.filter(|(_, fd)| is_ready(fd)).map(|(i, _)| i).collect(),
            accepts: is_crowded || fds[1..=num_listeners].iter().any(is_ready),
            has_room: fds[first_full..].iter().any(is_ready),
        }
    }

    /// Accepts all connections that wait, as long as there is room.
    fn accept(&mut self) {
        if self.strangers.len() >= MAX_STRANGERS {
            self.strangers.retain(|stranger| stranger.age() < OLD);
        }
        while self.strangers.len() < MAX_STRANGERS {
            let tcp = self.tcp.accept().map(|(stream, _)| Stranger::tcp(stream));
            let unix =
                || Some(self.unix.as_ref()?.accept().ok().and_then(|(stream, _)| Stranger::unix(stream)));
            let came = match tcp {
                Ok(stranger) => stranger,
                Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => match unix() {
                    Some(Some(stranger)) => Some(stranger),
                    _ => return,
                },
                Err(_) => {
                    // The connection has ended, or no descriptors are left; others may close.
                    std::thread::sleep(PAUSE / 10);
                    return;
                }
            };
            self.strangers.extend(came);
        }
    }

    fn advance(&mut self) {
        for stranger in std::mem::take(&mut self.strangers) {
            match stranger.advance(&self.shared.token) {
                Progress::Waits(stranger) => self.strangers.push(stranger),
                Progress::Known(hello, socket, file) => self.shared.admit(&hello, socket, file.as_ref()),
                Progress::Refused => {}
            }
        }
    }
}

/// Handles the end of a connection.
fn bury(Watched { connection, member }: &Watched) {
    let Some(member) = member.upgrade() else { return };
    let peer = connection.peer;
    if member.must_end() {
        return;
    }
    if connection.has_left() {
        return member.left(peer);
    }
    // The store may take long to answer, and the other groups go on.
    let lost = member.clone();
    let told = std::thread::Builder::new().name("lost rank".to_owned()).spawn(move || lost.lose(peer));
    if told.is_err() {
        member.lose(peer);
    }
}

/// Events of a connection that ends. Arriving bytes are the caller's.
fn end_of_connection() -> PollFlags {
    #[cfg(target_os = "linux")]
    return PollFlags::RDHUP;
    #[cfg(not(target_os = "linux"))]
    PollFlags::empty()
}

impl Purpose {
    /// Bytes of the ring of a link in shared memory: messages wait for long, in their sockets.
    pub(super) fn ring_bytes(self, distance: usize) -> usize {
        match (self, distance) {
            (Self::Messages, _) => 0,
            (Self::Collectives, 1) => super::RING_BYTES,
            (Self::Collectives, _) => super::SMALL_RING_BYTES,
        }
    }
}
