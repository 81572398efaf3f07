//! Client of a store.

use std::io::{self, ErrorKind, Read, Write};
use std::net::{IpAddr, TcpStream, ToSocketAddrs};
use std::sync::mpsc::channel;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use super::StoreError;
use super::protocol::{
    MAGIC, MAX_KEY, MAX_VALUE, Message, NOT_READY, Opcode, READY, invalid, read_bytes, read_number,
};
use crate::error::CommError;
use crate::launch::meeting::Meeting;

/// Time of one attempt to connect during a meeting.
const ATTEMPT: Duration = Duration::from_secs(5);
/// Interval of connection attempts.
const PAUSE: Duration = Duration::from_millis(100);

/// Client of a store, with a prefix of its keys.
///
/// Clones and [prefixed](Store::prefixed) views share one connection, which a wait blocks. Threads
/// that wait for each other's keys need connections of their own: [`Store::reconnect`].
#[derive(Clone)]
pub struct Store {
    connection: Arc<Mutex<Connection>>,
    prefix: String,
}

struct Connection {
    host: String,
    port: u16,
    /// Timeout of requests that need no waiting.
    timeout: Duration,
    local: IpAddr,
    /// `None` after an error: the next reply might belong to an earlier request.
    stream: Option<TcpStream>,
}

impl Store {
    /// Connects, retrying until `timeout`: the name may be unknown yet, and the server may start
    /// later. Requests that need no waiting have the same timeout.
    pub fn connect(host: &str, port: u16, timeout: Duration) -> Result<Self, StoreError> {
        let (began, address) = (Instant::now(), format!("{host}:{port}"));
        loop {
            let left = timeout.saturating_sub(began.elapsed());
            let reason = match open(host, port, left) {
                Ok(stream) => return Self::over(stream, host, port, timeout),
                Err(error) if error.kind() == ErrorKind::InvalidData => {
                    return Err(StoreError::NotAStore { address, found: error.to_string() });
                }
                Err(error) => error.to_string(),
            };
            let left = timeout.saturating_sub(began.elapsed());
            if left.is_zero() {
                return Err(StoreError::Unreachable { address, waited: timeout, reason });
            }
            std::thread::sleep(PAUSE.min(left));
        }
    }

    /// [`Store::connect`] during a meeting: says what it waits for, and ends at a signal. Requests
    /// that need no waiting have the timeout `patience`.
    pub(crate) fn meet(
        host: &str,
        port: u16,
        meeting: &mut Meeting<'_>,
        patience: Duration,
    ) -> Result<Self, CommError> {
        let address = format!("{host}:{port}");
        let (to_caller, attempts) = channel();
        let name = host.to_owned();
        // The system may look for a name for longer than a signal should wait.
        let attempt = move || {
            loop {
                let opened = open(&name, port, ATTEMPT);
                let is_over = match &opened {
                    Ok(_) => true,
                    Err(error) => error.kind() == ErrorKind::InvalidData,
                };
                // A caller that has given up is not there any more.
                if to_caller.send(opened).is_err() || is_over {
                    return;
                }
                std::thread::sleep(PAUSE);
            }
        };
        std::thread::Builder::new().name("store".to_owned()).spawn(attempt).map_err(|error| {
            CommError::Engine { reason: format!("the system refuses a thread to reach the store: {error}") }
        })?;
        let mut reason = "no attempt has ended yet".to_owned();
        loop {
            match attempts.recv_timeout(meeting.pause()) {
                Ok(Ok(stream)) => return Ok(Self::over(stream, host, port, patience)?),
                Ok(Err(error)) if error.kind() == ErrorKind::InvalidData => {
                    return Err(StoreError::NotAStore { address, found: error.to_string() }.into());
                }
                Ok(Err(error)) => reason = error.to_string(),
                Err(_) => {}
            }
            meeting.look(|| format!("the store of rank 0 at {address}; the last attempt: {reason}"))?;
            if meeting.is_overdue() {
                let never = StoreError::Unreachable { address, waited: meeting.deadline(), reason };
                // No rank is lost that was there: to start again would wait for the same address.
                return Err(CommError::Engine { reason: never.to_string() });
            }
        }
    }

    /// Creates a client over a connection that was greeted.
    fn over(stream: TcpStream, host: &str, port: u16, timeout: Duration) -> Result<Self, StoreError> {
        let connection = Connection::new(host, port, timeout, stream)
            .map_err(|error| lost(&format!("{host}:{port}"), "the greeting", &error))?;
        Ok(Self { connection: Arc::new(Mutex::new(connection)), prefix: String::new() })
    }

    /// Creates a client with the same server and prefix and a connection of its own.
    pub fn reconnect(&self) -> Result<Self, StoreError> {
        let (host, port, timeout) = {
            let connection = self.connection.lock().unwrap_or_else(PoisonError::into_inner);
            (connection.host.clone(), connection.port, connection.timeout)
        };
        Ok(Self { prefix: self.prefix.clone(), ..Self::connect(&host, port, timeout)? })
    }

    /// Returns a view in which every key has a further `prefix`, which separates attempts of a job
    /// and groups of ranks.
    pub fn prefixed(&self, prefix: &str) -> Self {
        Self { connection: self.connection.clone(), prefix: format!("{}{prefix}", self.prefix) }
    }

    /// Returns this machine's address on the route to the server, which others can probably reach.
    pub fn local_ip(&self) -> IpAddr {
        self.connection.lock().unwrap_or_else(PoisonError::into_inner).local
    }

    /// Sets a key. The server does not confirm, but serves a connection's requests in order.
    pub fn set(&self, key: &str, value: &[u8]) -> Result<(), StoreError> {
        let request = format!("set of {key}");
        check_value(&request, value)?;
        let message = Message::request(Opcode::Set).bytes(&self.key(key)?).bytes(value);
        self.ask(&request, |stream| stream.write_all(message.as_bytes()))
    }

    /// Sets a key to `new` if its value is `expected`; an empty `expected` also matches an absent
    /// key. Returns the key's value afterwards, or `expected` for an absent key.
    pub fn compare_set(&self, key: &str, expected: &[u8], new: &[u8]) -> Result<Vec<u8>, StoreError> {
        let request = format!("compare_set of {key}");
        check_value(&request, expected)?;
        check_value(&request, new)?;
        let message = Message::request(Opcode::CompareSet).bytes(&self.key(key)?).bytes(expected).bytes(new);
        self.ask(&request, |stream| {
            stream.write_all(message.as_bytes())?;
            read_bytes(stream, MAX_VALUE)
        })
    }

    /// Returns a key's value, and waits for it if necessary.
    pub fn get(&self, key: &str, timeout: Duration) -> Result<Vec<u8>, StoreError> {
        self.wait(&[key], timeout)?;
        let message = Message::request(Opcode::Get).bytes(&self.key(key)?);
        self.ask(&format!("get of {key}"), |stream| {
            stream.write_all(message.as_bytes())?;
            read_bytes(stream, MAX_VALUE)
        })
    }

    /// Adds to a counter, which starts at 0, and returns the sum.
    ///
    /// # Errors
    /// If the connection broke, as it does where the key holds no number.
    pub fn add(&self, key: &str, amount: i64) -> Result<i64, StoreError> {
        let message = Message::request(Opcode::Add).bytes(&self.key(key)?).number(amount.to_le_bytes());
        self.ask_number(&format!("add to {key}"), &message)
    }

    /// Deletes a key and returns whether it existed.
    pub fn delete(&self, key: &str) -> Result<bool, StoreError> {
        let message = Message::request(Opcode::Delete).bytes(&self.key(key)?);
        Ok(self.ask_number(&format!("delete of {key}"), &message)? > 0)
    }

    /// Returns whether all keys have values.
    pub fn check(&self, keys: &[&str]) -> Result<bool, StoreError> {
        let message = self.keys(Opcode::Check, keys)?;
        self.ask(&format!("check of {}", keys.join(", ")), |stream| {
            stream.write_all(message.as_bytes())?;
            read_ready(stream)
        })
    }

    /// Waits until all keys have values.
    ///
    /// # Errors
    /// If one has none after `timeout`; the error names the keys. If the connection broke.
    pub fn wait(&self, keys: &[&str], timeout: Duration) -> Result<(), StoreError> {
        let message = self.keys(Opcode::Wait, keys)?;
        let come = self.ask(&format!("wait for {}", keys.join(", ")), |stream| {
            stream.write_all(message.as_bytes())?;
            let usual = stream.read_timeout()?;
            // A timeout of 0 would mean none.
            stream.set_read_timeout(Some(timeout.max(Duration::from_millis(1))))?;
            let reply = read_number::<1>(stream);
            stream.set_read_timeout(usual)?;
            match reply {
                Ok([READY]) => return Ok(true),
                Ok([other]) => return Err(invalid(format!("{other} in reply to a wait"))),
                Err(error) if is_timeout(&error) => {}
                Err(error) => return Err(error),
            }
            stream.write_all(Message::request(Opcode::CancelWait).as_bytes())?;
            // The wait may have ended before its cancellation arrived; then both are answered.
            let come = read_ready(stream)?;
            if come && read_ready(stream)? {
                return Err(invalid("two replies to one wait".to_owned()));
            }
            Ok(come)
        })?;
        if come {
            return Ok(());
        }
        let keys = keys.iter().map(|key| format!("{}{key}", self.prefix)).collect();
        Err(StoreError::Timeout { address: self.address(), keys, waited: timeout })
    }

    fn address(&self) -> String {
        self.connection.lock().unwrap_or_else(PoisonError::into_inner).address()
    }

    /// Returns the key in its wire form.
    fn key(&self, key: &str) -> Result<Vec<u8>, StoreError> {
        let key = format!("/{}{key}", self.prefix);
        if key.len() as u64 > MAX_KEY {
            return Err(StoreError::TooLong { request: key.clone(), len: key.len(), limit: MAX_KEY });
        }
        Ok(key.into_bytes())
    }

    fn keys(&self, opcode: Opcode, keys: &[&str]) -> Result<Message, StoreError> {
        let message = Message::request(opcode).number((keys.len() as u64).to_le_bytes());
        keys.iter().try_fold(message, |message, key| Ok(message.bytes(&self.key(key)?)))
    }

    fn ask_number(&self, request: &str, message: &Message) -> Result<i64, StoreError> {
        self.ask(request, |stream| {
            stream.write_all(message.as_bytes())?;
            Ok(i64::from_le_bytes(read_number(stream)?))
        })
    }

    /// Sends one request. After a failure the connection is closed and every later request fails.
    fn ask<T>(
        &self,
        request: &str,
        talk: impl FnOnce(&mut TcpStream) -> io::Result<T>,
    ) -> Result<T, StoreError> {
        let mut connection = self.connection.lock().unwrap_or_else(PoisonError::into_inner);
        let result = match &mut connection.stream {
            Some(stream) => talk(stream),
            None => Err(io::Error::new(ErrorKind::NotConnected, "an earlier request failed")),
        };
        result.map_err(|error| {
            connection.stream = None;
            lost(&connection.address(), request, &error)
        })
    }
}

impl Connection {
    fn new(host: &str, port: u16, timeout: Duration, stream: TcpStream) -> io::Result<Self> {
        let timeout = timeout.max(Duration::from_millis(1));
        stream.set_read_timeout(Some(timeout))?;
        stream.set_write_timeout(Some(timeout))?;
        let local = stream.local_addr()?.ip();
        Ok(Self { host: host.to_owned(), port, timeout, local, stream: Some(stream) })
    }

    fn address(&self) -> String {
        format!("{}:{}", self.host, self.port)
    }
}

/// Opens a connection and checks that the server is a store.
fn open(host: &str, port: u16, timeout: Duration) -> io::Result<TcpStream> {
    let timeout = timeout.max(Duration::from_millis(1));
    let mut refused = io::Error::new(ErrorKind::NotFound, "the name has no address");
    for address in (host, port).to_socket_addrs()? {
        match TcpStream::connect_timeout(&address, timeout) {
            Ok(mut stream) => return greet(&mut stream, timeout).map(|()| stream),
            Err(error) => refused = error,
        }
    }
    Err(refused)
}

fn greet(stream: &mut TcpStream, timeout: Duration) -> io::Result<()> {
    stream.set_nodelay(true)?;
    stream.set_read_timeout(Some(timeout))?;
    stream.set_write_timeout(Some(timeout))?;
    stream.write_all(Message::request(Opcode::Validate).number(MAGIC.to_le_bytes()).as_bytes())?;
    // The validation has no reply. A check has one in every version of the protocol.
    let check = Message::request(Opcode::Check).number(1u64.to_le_bytes()).bytes(b"/tandem");
    stream.write_all(check.as_bytes())?;
    match read_ready(stream) {
        Err(error) if is_timeout(&error) => {
            Err(io::Error::new(ErrorKind::TimedOut, "connected, but no reply to the greeting"))
        }
        Err(error) if error.kind() == ErrorKind::UnexpectedEof => {
            Err(io::Error::new(ErrorKind::ConnectionAborted, "connected, but hung up on at the greeting"))
        }
        other => other.map(|_| ()),
    }
}

fn read_ready(stream: &mut impl Read) -> io::Result<bool> {
    match read_number::<1>(stream)? {
        [READY] => Ok(true),
        [NOT_READY] => Ok(false),
        [other] => Err(invalid(format!("it answered {other} where 0 or 1 is expected"))),
    }
}

fn is_timeout(error: &io::Error) -> bool {
    matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut)
}

fn lost(address: &str, request: &str, error: &io::Error) -> StoreError {
    StoreError::Lost { address: address.to_owned(), request: request.to_owned(), reason: error.to_string() }
}

fn check_value(request: &str, value: &[u8]) -> Result<(), StoreError> {
    if value.len() as u64 > MAX_VALUE {
        return Err(StoreError::TooLong { request: request.to_owned(), len: value.len(), limit: MAX_VALUE });
    }
    Ok(())
}
