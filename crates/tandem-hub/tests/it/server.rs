//! Server with the hub's interface: listings, HEAD with linked ETags, redirects to a second host
//! (another port), ranges, and faults on demand.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::{Arc, Mutex};

use ring::digest::{SHA1_FOR_LEGACY_USE_ONLY, SHA256, digest};
use serde_json::json;

pub const COMMIT: &str = "0123456789abcdef0123456789abcdef01234567";

/// Contents of a file, and whether it is stored on the second host.
pub struct Stored {
    pub bytes: Vec<u8>,
    pub is_large: bool,
}

/// A request, as it arrived.
#[derive(Clone, Debug)]
pub struct Request {
    /// Whether the second host got it.
    pub is_storage: bool,
    pub method: String,
    pub path: String,
    pub authorization: Option<String>,
    pub range: Option<String>,
}

/// Repository and faults. Each fault is used up from the front.
#[derive(Default)]
pub struct State {
    /// Files of `models/owner/name` or `datasets/owner/name`.
    pub repos: BTreeMap<String, BTreeMap<String, Stored>>,
    /// Statuses of the next responses of the hub: status, `X-Error-Code`, further headers.
    pub statuses: Vec<(u16, &'static str, &'static str)>,
    /// Bytes after which the next responses of the storage are cut.
    pub cuts: Vec<usize>,
    /// The next response of the storage has a wrong byte.
    pub is_corrupt: bool,
    /// The storage answers every range with the whole file.
    pub ignores_ranges: bool,
    /// The storage sends chunks and no length.
    pub is_chunked: bool,
    /// ETag instead of the right one.
    pub etag: Option<&'static str>,
    /// Token without which the repository is hidden.
    pub token: Option<&'static str>,
    /// Files of the listing that do not exist.
    pub listed: Vec<&'static str>,
    /// Former and present name of a repository, for a redirect.
    pub former: Option<(&'static str, &'static str)>,
    pub requests: Vec<Request>,
}

pub struct Server {
    pub endpoint: String,
    state: Arc<Mutex<State>>,
}

impl Server {
    /// Starts both hosts; they run as long as the tests.
    pub fn start(repo: &str, files: &[(&str, &str, bool)]) -> Self {
        let files = files.iter().map(|(name, text, is_large)| {
            ((*name).to_owned(), Stored { bytes: text.as_bytes().to_vec(), is_large: *is_large })
        });
        Self::with([(repo.to_owned(), files.collect())].into())
    }

    /// Starts both hosts with several repositories.
    pub fn with(repos: BTreeMap<String, BTreeMap<String, Stored>>) -> Self {
        let state = State { repos, ..State::default() };
        let state = Arc::new(Mutex::new(state));
        let listen = || TcpListener::bind("127.0.0.1:0").expect("a port");
        let (hub, storage) = (listen(), listen());
        let address =
            |listener: &TcpListener| format!("http://{}", listener.local_addr().expect("an address"));
        let (endpoint, second) = (address(&hub), address(&storage));
        for (listener, is_storage) in [(hub, false), (storage, true)] {
            let (state, second) = (Arc::clone(&state), second.clone());
            std::thread::spawn(move || {
                for stream in listener.incoming().flatten() {
                    let (state, second) = (Arc::clone(&state), second.clone());
                    // A client that hangs up ends its connection.
                    std::thread::spawn(move || drop(answer(stream, is_storage, &state, &second)));
                }
            });
        }
        Self { endpoint, state }
    }

    pub fn set(&self, change: impl FnOnce(&mut State)) {
        change(&mut self.state.lock().expect("no panic"));
    }

    /// Takes the requests so far.
    pub fn requests(&self) -> Vec<Request> {
        std::mem::take(&mut self.state.lock().expect("no panic").requests)
    }
}

fn answer(stream: TcpStream, is_storage: bool, state: &Mutex<State>, second: &str) -> std::io::Result<()> {
    let mut reader = BufReader::new(&stream);
    let mut line = String::new();
    reader.read_line(&mut line)?;
    let mut words = line.split_whitespace().map(str::to_owned);
    let (Some(method), Some(path)) = (words.next(), words.next()) else { return Ok(()) };
    let mut request = Request { is_storage, method, path, authorization: None, range: None };
    loop {
        let mut header = String::new();
        reader.read_line(&mut header)?;
        let Some((key, value)) = header.split_once(':') else { break };
        match key.to_lowercase().as_str() {
            "authorization" => request.authorization = Some(value.trim().to_owned()),
            "range" => request.range = Some(value.trim().to_owned()),
            _ => {}
        }
    }
    let mut state = state.lock().expect("no panic");
    state.requests.push(request.clone());
    let reply = if is_storage { store(&mut state, &request) } else { hub(&mut state, &request, second) };
    drop(state);
    (&stream).write_all(&reply)
}

fn response(status: u16, headers: &str, body: &[u8]) -> Vec<u8> {
    let head = format!(
        "HTTP/1.1 {status} X\r\nConnection: close\r\nContent-Length: {}\r\n{headers}\r\n",
        body.len()
    );
    [head.as_bytes(), body].concat()
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

impl Stored {
    fn git(&self) -> String {
        let object = [format!("blob {}\0", self.bytes.len()).as_bytes(), &self.bytes].concat();
        hex(digest(&SHA1_FOR_LEGACY_USE_ONLY, &object).as_ref())
    }

    pub fn etag(&self) -> String {
        if self.is_large { hex(digest(&SHA256, &self.bytes).as_ref()) } else { self.git() }
    }
}

fn hub(state: &mut State, request: &Request, second: &str) -> Vec<u8> {
    let is_head = request.method == "HEAD";
    let send = |status, headers: &str, body: &str| {
        let whole = response(status, headers, body.as_bytes());
        let end = whole.len() - if is_head { body.len() } else { 0 };
        whole[..end].to_vec()
    };
    if !state.statuses.is_empty() {
        let (status, code, headers) = state.statuses.remove(0);
        return send(
            status,
            &format!("X-Error-Code: {code}\r\n{headers}"),
            "{\"error\": \"as the test asks\"}",
        );
    }
    let allowed =
        state.token.is_none_or(|token| request.authorization.as_deref() == Some(&format!("Bearer {token}")));
    if !allowed {
        return send(401, "X-Error-Code: RepoNotFound\r\n", "{}");
    }
    if let Some((former, now)) = state.former.filter(|(former, _)| request.path.contains(former)) {
        return send(307, &format!("Location: {}\r\n", request.path.replace(former, now)), "");
    }
    let path = request.path.split('?').next().unwrap_or_default();
    let wanted = path.trim_start_matches("/api/").trim_start_matches('/');
    let is_wanted = |repo: &str| {
        let rest = wanted.strip_prefix(repo).or_else(|| wanted.strip_prefix(repo.strip_prefix("models/")?));
        rest.is_some_and(|rest| rest.starts_with('/'))
    };
    let Some((repo, files)) = state.repos.iter().find(|(repo, _)| is_wanted(repo)) else {
        return send(404, "X-Error-Code: RepoNotFound\r\n", "{}");
    };
    let id = repo.split_once('/').expect("kind and name").1;
    if let Some(api) = path.strip_prefix("/api/") {
        let Some(after) = api.strip_prefix(&format!("{repo}/")) else {
            return send(404, "X-Error-Code: RepoNotFound\r\n", "{}");
        };
        let (action, revision) = after.split_once('/').unwrap_or((after, "main"));
        if ![COMMIT, "main", "v1", "refs%2Fpr%2F1"].contains(&revision) {
            return send(404, "X-Error-Code: RevisionNotFound\r\n", "{}");
        }
        if action == "tree" {
            let entry = |(name, stored): (&String, &Stored)| {
                let lfs = json!({"oid": stored.etag(), "size": stored.bytes.len(), "pointerSize": 100});
                let mut entry =
                    json!({"type": "file", "path": name, "size": stored.bytes.len(), "oid": stored.git()});
                if stored.is_large {
                    entry["lfs"] = lfs;
                }
                entry
            };
            let tree: Vec<_> = files.iter().map(entry).collect();
            return send(200, "Content-Type: application/json\r\n", &json!(tree).to_string());
        }
        let names = files.keys().map(String::as_str).chain(state.listed.iter().copied());
        let siblings: Vec<_> = names.map(|name| json!({"rfilename": name})).collect();
        let info = json!({"id": id, "_id": "1", "modelId": id, "sha": COMMIT, "siblings": siblings,
            "private": false, "disabled": false, "gated": false, "tags": [], "downloads": 0, "likes": 0,
            "lastModified": "2026-01-01T00:00:00.000Z", "createdAt": "2026-01-01T00:00:00.000Z"});
        return send(200, "Content-Type: application/json\r\n", &info.to_string());
    }
    let base = match repo.starts_with("models/") {
        true => format!("/{id}/resolve/"),
        false => format!("/{repo}/resolve/"),
    };
    let Some((_, name)) = path.strip_prefix(&base).and_then(|path| path.split_once('/')) else {
        return send(404, "X-Error-Code: RepoNotFound\r\n", "");
    };
    let Some(stored) = files.get(name) else {
        return send(404, "X-Error-Code: EntryNotFound\r\n", "");
    };
    let etag = state.etag.map_or_else(|| stored.etag(), str::to_owned);
    if stored.is_large {
        let headers = format!(
            "X-Repo-Commit: {COMMIT}\r\nX-Linked-Etag: \"{etag}\"\r\nX-Linked-Size: {}\r\nETag: \"other\"\r\n\
             Location: {second}/{name}?signature=1&repo={repo}\r\n",
            stored.bytes.len()
        );
        return send(302, &headers, "");
    }
    let text = String::from_utf8_lossy(&stored.bytes).into_owned();
    send(200, &format!("X-Repo-Commit: {COMMIT}\r\nETag: W/\"{etag}\"\r\n"), &text)
}

fn store(state: &mut State, request: &Request) -> Vec<u8> {
    let name = request.path.trim_start_matches('/').split('?').next().unwrap_or_default().to_owned();
    let repo = request.path.split_once("repo=").expect("the hub named the repository").1;
    let mut bytes = state.repos[repo][&name].bytes.clone();
    if std::mem::take(&mut state.is_corrupt) {
        bytes[0] ^= 1;
    }
    let from = request.range.as_ref().filter(|_| !state.ignores_ranges);
    let from = from.and_then(|range| range.strip_prefix("bytes=")?.strip_suffix('-')?.parse::<usize>().ok());
    let total = bytes.len();
    let part = &bytes[from.unwrap_or(0).min(total)..];
    let reply = match from {
        Some(from) if from >= total => response(416, &format!("Content-Range: bytes */{total}\r\n"), b""),
        Some(from) => response(206, &format!("Content-Range: bytes {from}-{}/{total}\r\n", total - 1), part),
        None if state.is_chunked => {
            let mut reply =
                b"HTTP/1.1 200 X\r\nConnection: close\r\nTransfer-Encoding: chunked\r\n\r\n".to_vec();
            for chunk in part.chunks(1000) {
                reply.extend(
                    format!("{:x}\r\n", chunk.len()).bytes().chain(chunk.iter().copied()).chain(*b"\r\n"),
                );
            }
            reply.extend(*b"0\r\n\r\n");
            reply
        }
        None => response(200, "", part),
    };
    let cut = if state.cuts.is_empty() { usize::MAX } else { state.cuts.remove(0) };
    let body = reply.windows(4).position(|window| window == b"\r\n\r\n").expect("a head") + 4;
    reply[..reply.len().min(body.saturating_add(cut))].to_vec()
}
