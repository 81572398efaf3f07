//! Server of a store.
//!
//! One thread accepts connections; another per connection reads its requests. A `Wait` that cannot
//! be answered is stored, and answered by the thread whose request sets its last key. Replies to
//! waits are written under the lock of the values, which orders a wait's end and its cancellation.

use std::collections::{HashMap, HashSet};
use std::io::{self, BufReader, ErrorKind, Read, Write};
use std::net::{Ipv4Addr, Ipv6Addr, Shutdown, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use super::StoreError;
use super::protocol::{
    MAGIC, MAX_KEY, MAX_VALUE, Message, NOT_READY, Opcode, READY, invalid, read_bytes, read_count,
    read_number,
};

/// Time for a client to read a reply before it is dropped.
const PATIENCE: Duration = Duration::from_secs(5);

/// Store served by this process until the value is dropped.
pub struct StoreServer {
    port: u16,
    shared: Arc<Shared>,
    accepting: Option<JoinHandle<()>>,
}

#[derive(Default)]
struct Shared {
    state: Mutex<State>,
    closing: AtomicBool,
}

#[derive(Default)]
struct State {
    values: HashMap<Vec<u8>, Vec<u8>>,
    waits: Vec<Wait>,
    /// Open connections by number, closed when the server is dropped.
    clients: HashMap<u64, TcpStream>,
}

struct Wait {
    client: u64,
    missing: HashSet<Vec<u8>>,
    reply_to: TcpStream,
}

impl StoreServer {
    /// Serves at a port on all addresses of this machine; 0 selects a free port.
    pub fn bind(port: u16) -> Result<Self, StoreError> {
        // The IPv6 socket accepts IPv4 too; a kernel without IPv6 has only the other.
        let listener = match TcpListener::bind((Ipv6Addr::UNSPECIFIED, port)) {
            Err(error) if error.kind() != ErrorKind::AddrInUse => {
                TcpListener::bind((Ipv4Addr::UNSPECIFIED, port))
            }
            other => other,
        };
        let bound = listener.and_then(|listener| Ok((listener.local_addr()?.port(), listener)));
        let (port, listener) = bound.map_err(|error| StoreError::Bind { port, reason: error.to_string() })?;
        let shared = Arc::new(Shared::default());
        let accepting = std::thread::spawn({
            let shared = shared.clone();
            move || accept(&listener, &shared)
        });
        Ok(Self { port, shared, accepting: Some(accepting) })
    }

    /// Returns the port.
    pub fn port(&self) -> u16 {
        self.port
    }
}

impl Drop for StoreServer {
    fn drop(&mut self) {
        self.shared.closing.store(true, Ordering::SeqCst);
        // A connection wakes the accepting thread, which then ends.
        let woken = TcpStream::connect((Ipv4Addr::LOCALHOST, self.port))
            .or_else(|_| TcpStream::connect((Ipv6Addr::LOCALHOST, self.port)));
        if let (Ok(_), Some(accepting)) = (woken, self.accepting.take()) {
            // The thread has no panics to report.
            let _ = accepting.join();
        }
        for client in self.shared.lock().clients.values() {
            // A closed connection needs no shutdown.
            let _ = client.shutdown(Shutdown::Both);
        }
    }
}

fn accept(listener: &TcpListener, shared: &Arc<Shared>) {
    for (number, stream) in (0..).zip(listener.incoming()) {
        if shared.closing.load(Ordering::SeqCst) {
            return;
        }
        let Ok(stream) = stream else {
            // Probably no file descriptors are left; other connections may close.
            std::thread::sleep(Duration::from_millis(10));
            continue;
        };
        let shared = shared.clone();
        let serving = std::thread::Builder::new().stack_size(256 << 10).spawn(move || {
            // A connection that fails or breaks the protocol ends; the server and its values stay.
            let _ = shared.serve(number, stream);
            let mut state = shared.lock();
            state.clients.remove(&number);
            state.waits.retain(|wait| wait.client != number);
        });
        // Without a thread the stream is dropped, which disconnects: the client tries again.
        drop(serving);
    }
}

impl Shared {
    /// Locks the state. No code between locking and unlocking can panic during a change.
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Serves one connection until it ends.
    fn serve(&self, client: u64, mut stream: TcpStream) -> io::Result<()> {
        stream.set_nodelay(true)?;
        stream.set_write_timeout(Some(PATIENCE))?;
        self.lock().clients.insert(client, stream.try_clone()?);
        if self.closing.load(Ordering::SeqCst) {
            // The server may have closed all clients before this one was among them.
            return Ok(());
        }
        let mut from = BufReader::new(stream.try_clone()?);
        if opcode(&mut from)? != Some(Opcode::Validate) || read_number(&mut from)? != MAGIC.to_le_bytes() {
            return Err(invalid("no validation at the beginning".to_owned()));
        }
        while let Some(opcode) = opcode(&mut from)? {
            match opcode {
                Opcode::Wait => {
                    let keys = read_keys(&mut from)?;
                    self.lock().wait(client, keys, &stream)?;
                }
                Opcode::CancelWait => {
                    let mut state = self.lock();
                    state.waits.retain(|wait| wait.client != client);
                    stream.write_all(&[NOT_READY])?;
                }
                _ => {
                    let reply = self.answer(opcode, &mut from)?;
                    stream.write_all(reply.as_bytes())?;
                }
            }
        }
        Ok(())
    }

    /// Computes the reply to a request without waiting. The request is read completely before the
    /// lock.
    fn answer(&self, opcode: Opcode, from: &mut impl Read) -> io::Result<Message> {
        let reply = Message::default();
        Ok(match opcode {
            Opcode::Set => {
                let (key, value) = (read_key(from)?, read_value(from)?);
                self.lock().set(key, value);
                reply
            }
            Opcode::Append => {
                let (key, more) = (read_key(from)?, read_value(from)?);
                self.lock().append(key, &more)?;
                reply
            }
            Opcode::CompareSet => {
                let (key, expected, new) = (read_key(from)?, read_value(from)?, read_value(from)?);
                reply.bytes(&self.lock().compare_set(key, expected, new))
            }
            Opcode::Get => {
                let key = read_key(from)?;
                reply.bytes(self.lock().get(&key)?)
            }
            Opcode::MultiGet => {
                let keys = read_keys(from)?;
                let state = self.lock();
                keys.iter().try_fold(reply, |reply, key| io::Result::Ok(reply.bytes(state.get(key)?)))?
            }
            Opcode::MultiSet => {
                for _ in 0..read_count(from)? {
                    let (key, value) = (read_key(from)?, read_value(from)?);
                    self.lock().set(key, value);
                }
                reply
            }
            Opcode::Add => {
                let (key, amount) = (read_key(from)?, i64::from_le_bytes(read_number(from)?));
                reply.number(self.lock().add(key, amount)?.to_le_bytes())
            }
            Opcode::Check => {
                let keys = read_keys(from)?;
                let state = self.lock();
                let all = keys.iter().all(|key| state.values.contains_key(key));
                reply.number([if all { READY } else { NOT_READY }])
            }
            Opcode::NumKeys => reply.number((self.lock().values.len() as i64).to_le_bytes()),
            Opcode::Delete => {
                let key = read_key(from)?;
                let deleted = self.lock().values.remove(&key);
                reply.number(i64::from(deleted.is_some()).to_le_bytes())
            }
            Opcode::Ping => reply.number(read_number::<4>(from)?),
            Opcode::Validate | Opcode::Wait | Opcode::CancelWait => {
                return Err(invalid(format!("{opcode:?} out of turn")));
            }
        })
    }
}

impl State {
    fn set(&mut self, key: Vec<u8>, value: Vec<u8>) {
        self.waits.retain_mut(|wait| {
            wait.missing.remove(&key);
            let over = wait.missing.is_empty();
            if over && wait.reply_to.write_all(&[READY]).is_err() {
                // The client reads nothing; its own thread cleans up.
                let _ = wait.reply_to.shutdown(Shutdown::Both);
            }
            !over
        });
        self.values.insert(key, value);
    }

    fn get(&self, key: &[u8]) -> io::Result<&[u8]> {
        let value = self.values.get(key).map(Vec::as_slice);
        value.ok_or_else(|| invalid(format!("get of {:?}, which has no value", String::from_utf8_lossy(key))))
    }

    fn append(&mut self, key: Vec<u8>, more: &[u8]) -> io::Result<()> {
        let mut value = self.values.get(&key).cloned().unwrap_or_default();
        value.extend(more);
        if value.len() as u64 > MAX_VALUE {
            return Err(invalid(format!("a value of {} bytes where {MAX_VALUE} are the most", value.len())));
        }
        self.set(key, value);
        Ok(())
    }

    fn compare_set(&mut self, key: Vec<u8>, expected: Vec<u8>, new: Vec<u8>) -> Vec<u8> {
        match self.values.get(&key) {
            Some(value) if *value != expected => value.clone(),
            None if !expected.is_empty() => expected,
            _ => {
                self.set(key, new.clone());
                new
            }
        }
    }

    fn add(&mut self, key: Vec<u8>, amount: i64) -> io::Result<i64> {
        let value = match self.values.get(&key) {
            None => 0,
            Some(digits) => std::str::from_utf8(digits)
                .ok()
                .and_then(|digits| digits.parse::<i64>().ok())
                .ok_or_else(|| invalid("add to what is no number".to_owned()))?,
        };
        let sum = value.wrapping_add(amount);
        self.set(key, sum.to_string().into_bytes());
        Ok(sum)
    }

    /// Answers a wait or stores it.
    fn wait(&mut self, client: u64, keys: Vec<Vec<u8>>, mut reply_to: &TcpStream) -> io::Result<()> {
        if self.waits.iter().any(|wait| wait.client == client) {
            return Err(invalid("a wait during a wait".to_owned()));
        }
        let missing: HashSet<_> = keys.into_iter().filter(|key| !self.values.contains_key(key)).collect();
        if missing.is_empty() {
            return reply_to.write_all(&[READY]);
        }
        self.waits.push(Wait { client, missing, reply_to: reply_to.try_clone()? });
        Ok(())
    }
}

/// Reads the next opcode; `None` where the client disconnected.
fn opcode(from: &mut impl Read) -> io::Result<Option<Opcode>> {
    let byte = match read_number::<1>(from) {
        Ok([byte]) => byte,
        Err(error) if error.kind() == ErrorKind::UnexpectedEof => return Ok(None),
        Err(error) => return Err(error),
    };
    Opcode::from_byte(byte).map(Some).ok_or_else(|| invalid(format!("opcode {byte}")))
}

fn read_key(from: &mut impl Read) -> io::Result<Vec<u8>> {
    read_bytes(from, MAX_KEY)
}

fn read_value(from: &mut impl Read) -> io::Result<Vec<u8>> {
    read_bytes(from, MAX_VALUE)
}

fn read_keys(from: &mut impl Read) -> io::Result<Vec<Vec<u8>>> {
    (0..read_count(from)?).map(|_| read_key(from)).collect()
}
