//! Cached replies and the budget of requests.

use std::fs;
use std::path::Path;

use tandem_judge::{EndpointConfig, EndpointJudge, Judge};

use crate::endpoint::{config, error, fair, start};
use crate::server::Server;
use crate::support::{judge, scores};

fn cached(server: &Server, folder: &Path) -> EndpointJudge {
    start(EndpointConfig { cache: Some(folder.to_path_buf()), concurrency: 1, ..config(&server.base_url) })
}

#[test]
fn what_is_in_the_cache_is_not_asked() {
    let (server, folder) = (Server::start(fair), tempfile::tempdir().unwrap());
    let cache = folder.path().join("new/folder");
    let first = judge(&mut cached(&server, &cache), "?", &["m", "z", "a"]).unwrap();
    assert_eq!(server.requests().len(), 6);
    let mut again = cached(&server, &cache);
    assert_eq!(judge(&mut again, "?", &["m", "z", "a"]).unwrap(), first);
    assert_eq!((again.counts().cache_hits, again.counts().spent, server.requests().len()), (6, 0, 6));
    // Another prompt, order of answers, model or template is another request.
    judge(&mut again, "!", &["m", "z"]).unwrap();
    assert_eq!(server.requests().len(), 8);
    judge(&mut again, "?", &["z", "m"]).unwrap();
    assert_eq!(server.requests().len(), 8);
    let other = EndpointConfig { model: "small".to_owned(), cache: Some(cache), ..config(&server.base_url) };
    judge(&mut start(other), "?", &["m", "z"]).unwrap();
    assert_eq!(server.requests().len(), 10);
}

#[test]
fn a_cache_that_was_cut_off_loses_one_line() {
    let (server, folder) = (Server::start(fair), tempfile::tempdir().unwrap());
    let expected = judge(&mut cached(&server, folder.path()), "?", &["m", "z", "é"]).unwrap();
    let file = folder.path().join("replies.jsonl");
    let bytes = fs::read(&file).unwrap();
    for cut in [2, 60] {
        fs::write(&file, &bytes[..bytes.len() - cut]).unwrap();
        let mut endpoint = cached(&server, folder.path());
        assert_eq!(judge(&mut endpoint, "?", &["m", "z", "é"]).unwrap(), expected);
        assert_eq!((endpoint.counts().cache_hits, endpoint.counts().spent), (5, 1));
        // The repeated reply was not appended to the incomplete line.
        let mut endpoint = cached(&server, folder.path());
        judge(&mut endpoint, "?", &["m", "z", "é"]).unwrap();
        assert_eq!((endpoint.counts().cache_hits, endpoint.counts().spent), (6, 0));
    }
}

#[test]
fn two_may_use_one_cache() {
    let (server, folder) = (Server::start(fair), tempfile::tempdir().unwrap());
    let mut two = [cached(&server, folder.path()), cached(&server, folder.path())];
    for round in 0..3 {
        for (number, endpoint) in two.iter_mut().enumerate() {
            judge(endpoint, &format!("{round}/{number}"), &["a", "b"]).unwrap();
        }
    }
    let mut third = cached(&server, folder.path());
    for prompt in ["0/0", "0/1", "1/0", "1/1", "2/0", "2/1"] {
        judge(&mut third, prompt, &["a", "b"]).unwrap();
    }
    assert_eq!((third.counts().cache_hits, third.counts().spent), (12, 0));
}

#[test]
fn a_cache_that_cannot_be_opened_is_an_error() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("file");
    fs::write(&file, "").unwrap();
    let config = EndpointConfig { cache: Some(file), ..config("http://localhost/v1") };
    let error = EndpointJudge::new("mine", config).unwrap_err().to_string();
    assert!(error.starts_with("judge `mine`: opening the cache "), "{error}");
}

#[test]
fn a_spent_budget_is_an_error_and_what_was_paid_for_is_kept() {
    let (server, folder) = (Server::start(fair), tempfile::tempdir().unwrap());
    let with_budget = || {
        let cache = Some(folder.path().to_path_buf());
        start(EndpointConfig { cache, budget: Some(3), concurrency: 1, ..config(&server.base_url) })
    };
    let mut endpoint = with_budget();
    let error = judge(&mut endpoint, "?", &["m", "z", "a"]).unwrap_err().to_string();
    assert!(error.starts_with("judge `endpoint`: the budget of 3 requests is spent"), "{error}");
    assert_eq!((endpoint.counts().spent, server.requests().len()), (3, 3));
    let mut endpoint = with_budget();
    assert_eq!(
        scores(&judge(&mut endpoint, "?", &["m", "z", "a"]).unwrap()),
        [Some(0.5), Some(1.0), Some(0.0)]
    );
    assert_eq!((endpoint.counts().cache_hits, endpoint.counts().spent), (3, 3));
}

#[test]
fn retries_are_paid_from_the_budget() {
    let server = Server::start(|_, _| error(500));
    let mut endpoint = start(EndpointConfig { budget: Some(4), concurrency: 1, ..config(&server.base_url) });
    let error = judge(&mut endpoint, "?", &["a", "b"]).unwrap_err().to_string();
    assert!(error.contains("the budget of 4 requests is spent"), "{error}");
    assert_eq!(server.requests().len(), 4);
}
