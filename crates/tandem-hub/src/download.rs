//! Download of one file into a blob: continued, checked, then named.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};
use std::time::Duration;

use ring::digest::{Context, SHA1_FOR_LEGACY_USE_ONLY, SHA256};
use ureq::Body;
use ureq::http::Response;

use crate::client::{ATTEMPTS, Client, Failure, Method, header};
use crate::error::{HubError, Result};
use crate::hub::Progress;

/// Longest time of one response. A download that stalls is cut and continued.
const SLICE: Duration = Duration::from_secs(120);

/// File as the hub describes it.
#[derive(Debug)]
pub(crate) struct Metadata {
    pub etag: String,
    pub size: Option<u64>,
}

impl Metadata {
    /// Reads the headers of a HEAD response.
    pub(crate) fn read(response: &Response<Body>) -> Result<Self, String> {
        let linked = header(response, "x-linked-etag");
        let Some(etag) = linked.or_else(|| header(response, "etag")) else {
            return Err("the response has no ETag".to_owned());
        };
        let etag = etag.strip_prefix("W/").unwrap_or(&etag).trim_matches('"').to_owned();
        let legal = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_' | b'.');
        // It becomes a file's name.
        if etag.is_empty() || etag.len() > 128 || etag.starts_with('.') || !etag.bytes().all(legal) {
            return Err(format!("the ETag {etag:?} cannot name a file"));
        }
        let is_redirect = response.status().is_redirection();
        let own = || if is_redirect { None } else { header(response, "content-length") };
        let size = header(response, "x-linked-size").or_else(own);
        let size =
            size.map(|size| size.trim().parse().map_err(|_| format!("the size {size:?} is no number")));
        Ok(Self { etag, size: size.transpose()? })
    }
}

/// Download of a blob.
pub(crate) struct Download<'a> {
    pub client: &'a Client,
    pub url: &'a str,
    /// The file's name, for messages.
    pub file: &'a str,
    pub metadata: &'a Metadata,
    pub blob: &'a Path,
}

impl Download<'_> {
    /// Downloads the blob; the caller holds its lock.
    pub(crate) fn run(&self, progress: &mut dyn Progress) -> Result<()> {
        let partial = PathBuf::from(format!("{}.incomplete", self.blob.display()));
        let mut reason = String::new();
        for _ in 0..2 {
            self.transfer(&partial, progress)?;
            match self.check(&partial)? {
                None => return fs::rename(&partial, self.blob).map_err(HubError::io("write", self.blob)),
                Some(wrong) => {
                    // The part of an earlier download may be at fault; once more from the start.
                    fs::remove_file(&partial).map_err(HubError::io("remove", &partial))?;
                    reason = wrong;
                }
            }
        }
        Err(HubError::Corrupt { file: self.file.to_owned(), reason })
    }

    /// Completes the partial file.
    fn transfer(&self, partial: &Path, progress: &mut dyn Progress) -> Result<()> {
        let file = OpenOptions::new().create(true).truncate(false).write(true).open(partial);
        let mut file = file.map_err(HubError::io("write", partial))?;
        let size = self.metadata.size;
        let mut done = file.metadata().map_err(HubError::io("read", partial))?.len();
        if size.is_some_and(|size| done > size) {
            done = 0;
        }
        self.require_room(partial, done)?;
        let (mut failures, mut limit) = (0, Some(SLICE));
        progress.bytes(self.file, done, size);
        while size.is_none_or(|size| done < size) || size == Some(0) {
            let before = done;
            let failure = match self.client.send(Method::Get, self.url, done, limit) {
                Ok(response) => {
                    let begins = first_byte(&response);
                    if begins != done {
                        // The server sends the whole file, however long that takes.
                        (done, limit) = (0, None);
                    }
                    if begins == 0 || begins == done {
                        match self.copy(response, &mut file, partial, &mut done, progress)? {
                            None if size.is_none_or(|size| done >= size) => break,
                            None => Failure::Network(format!("the connection ended after {done} bytes")),
                            Some(failure) => failure,
                        }
                    } else {
                        Failure::Network("the server sends another part than was asked for".to_owned())
                    }
                }
                // The partial file is longer than the file; from the start.
                Err(Failure::Status { status: 416, .. }) if done > 0 => {
                    done = 0;
                    Failure::Network("the server has no such part".to_owned())
                }
                Err(failure) => failure,
            };
            failures = if done > before { 1 } else { failures + 1 };
            if !failure.may_pass() || failures >= ATTEMPTS {
                return Err(HubError::network(self.file, &(failures, failure)));
            }
            self.client.wait(failures, &failure);
        }
        if size.is_some_and(|size| done > size) {
            return Err(HubError::Protocol {
                url: self.url.to_owned(),
                reason: format!("sent {done} bytes where the hub states {}", size.unwrap_or_default()),
            });
        }
        file.set_len(done).and_then(|()| file.sync_data()).map_err(HubError::io("write", partial))
    }

    /// Copies a response's body to the file's position `done`. A failure of the connection is
    /// returned, one of the disk an error.
    fn copy(
        &self,
        mut response: Response<Body>,
        file: &mut File,
        partial: &Path,
        done: &mut u64,
        progress: &mut dyn Progress,
    ) -> Result<Option<Failure>> {
        file.seek(SeekFrom::Start(*done)).map_err(HubError::io("write", partial))?;
        file.set_len(*done).map_err(HubError::io("write", partial))?;
        let mut body = response.body_mut().with_config().limit(u64::MAX).reader();
        let mut buffer = vec![0; 1 << 18];
        loop {
            let count = match body.read(&mut buffer) {
                Ok(0) => return Ok(None),
                Ok(count) => count,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                Err(error) => return Ok(Some(Failure::Network(format!("the connection broke ({error})")))),
            };
            file.write_all(&buffer[..count]).map_err(HubError::io("write", partial))?;
            *done += count as u64;
            progress.bytes(self.file, *done, self.metadata.size);
            if self.metadata.size.is_some_and(|size| *done > size) {
                return Ok(None);
            }
        }
    }

    fn require_room(&self, partial: &Path, done: u64) -> Result<()> {
        let folder = partial.parent().expect("it is in blobs");
        let (Some(size), Ok(disk)) = (self.metadata.size, rustix::fs::statvfs(folder)) else { return Ok(()) };
        let (needed, free) = (size.saturating_sub(done), disk.f_bavail.saturating_mul(disk.f_frsize));
        match needed > free {
            false => Ok(()),
            true => Err(HubError::NoRoom {
                file: self.file.to_owned(),
                needed,
                free,
                cache: folder.to_path_buf(),
            }),
        }
    }

    /// Compares size and hash with the hub's statement. The file on disk is read, so that a second
    /// writer would be noticed.
    fn check(&self, partial: &Path) -> Result<Option<String>> {
        let mut file = File::open(partial).map_err(HubError::io("read", partial))?;
        let length = file.metadata().map_err(HubError::io("read", partial))?.len();
        if let Some(size) = self.metadata.size.filter(|size| *size != length) {
            return Ok(Some(format!("{length} bytes instead of {size}")));
        }
        let etag = &self.metadata.etag;
        let is_hash = etag.bytes().all(|byte| byte.is_ascii_hexdigit());
        let mut context = match etag.len() {
            // The SHA-256 of a large file, the git object of a small one.
            64 if is_hash => Context::new(&SHA256),
            40 if is_hash => {
                let mut context = Context::new(&SHA1_FOR_LEGACY_USE_ONLY);
                context.update(format!("blob {length}\0").as_bytes());
                context
            }
            _ => return Ok(None),
        };
        let mut buffer = vec![0; 1 << 20];
        loop {
            match file.read(&mut buffer).map_err(HubError::io("read", partial))? {
                0 => break,
                count => context.update(&buffer[..count]),
            }
        }
        let found: String = context.finish().as_ref().iter().map(|byte| format!("{byte:02x}")).collect();
        Ok((!found.eq_ignore_ascii_case(etag)).then(|| format!("its hash is {found} instead of {etag}")))
    }
}

/// First byte of a response: 0, unless it is partial.
fn first_byte(response: &Response<Body>) -> u64 {
    if response.status().as_u16() != 206 {
        return 0;
    }
    let range = header(response, "content-range").unwrap_or_default();
    let start =
        range.trim().strip_prefix("bytes").and_then(|range| range.trim().split('-').next()?.parse().ok());
    start.unwrap_or(u64::MAX)
}
