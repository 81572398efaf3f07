//! The store: its client and server against each other, and against PyTorch's if installed.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::process::{Command, Stdio};
use std::sync::Barrier;
use std::time::Duration;

use tandem_comm::store::{Store, StoreError, StoreServer};

/// Longer than anything here takes; only a bug waits for it.
const LONG: Duration = Duration::from_secs(60);
/// Timeout of waits that end by it.
const SHORT: Duration = Duration::from_millis(50);

fn client(server: &StoreServer) -> Store {
    Store::connect("127.0.0.1", server.port(), LONG).unwrap()
}

#[test]
fn what_one_client_sets_the_others_get() {
    let server = StoreServer::bind(0).unwrap();
    let (one, two) = (client(&server), client(&server));
    let value: Vec<u8> = (0..100_000u32).map(|i| i as u8).collect();
    one.set("long", &value).unwrap();
    one.set("empty", b"").unwrap();
    assert_eq!(two.get("long", LONG).unwrap(), value);
    assert_eq!(two.get("empty", LONG).unwrap(), b"");
    assert!(two.check(&["long", "empty"]).unwrap());
    assert!(!two.check(&["long", "absent"]).unwrap());
    assert!(two.delete("long").unwrap());
    assert!(!two.delete("long").unwrap());
    assert!(!one.check(&["long"]).unwrap());
}

#[test]
fn a_get_waits_for_the_key_and_a_wait_for_all_of_them() {
    let server = StoreServer::bind(0).unwrap();
    std::thread::scope(|scope| {
        let waiting: Vec<_> = (0..5)
            .map(|i| {
                let store = client(&server);
                scope.spawn(move || {
                    store.wait(&["a", "b", "c"], LONG).unwrap();
                    store.get(&format!("late-{i}"), LONG).unwrap()
                })
            })
            .collect();
        let store = client(&server);
        for key in ["b", "c", "a", "late-4", "late-2", "late-0", "late-1", "late-3"] {
            store.set(key, key.as_bytes()).unwrap();
        }
        for (i, waiting) in waiting.into_iter().enumerate() {
            assert_eq!(waiting.join().unwrap(), format!("late-{i}").into_bytes());
        }
    });
}

#[test]
fn eight_threads_count_without_losing_one() {
    let server = StoreServer::bind(0).unwrap();
    let together = Barrier::new(8);
    let mut sums: Vec<i64> = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..8)
            .map(|_| {
                let (store, together) = (client(&server), &together);
                scope.spawn(move || {
                    together.wait();
                    (0..200).map(|_| store.add("count", 3).unwrap()).collect::<Vec<_>>()
                })
            })
            .collect();
        threads.into_iter().flat_map(|thread| thread.join().unwrap()).collect()
    });
    sums.sort_unstable();
    assert_eq!(sums, (1..=1600).map(|i| 3 * i).collect::<Vec<i64>>(), "every sum was seen once");
    let store = client(&server);
    assert_eq!(store.get("count", LONG).unwrap(), b"4800");
    assert_eq!(store.add("count", -4801).unwrap(), -1);
}

#[test]
fn of_those_that_want_to_be_first_one_is() {
    let server = StoreServer::bind(0).unwrap();
    let store = client(&server);
    assert_eq!(store.compare_set("first", b"", b"rank 3").unwrap(), b"rank 3");
    assert_eq!(store.compare_set("first", b"", b"rank 5").unwrap(), b"rank 3");
    assert_eq!(store.compare_set("first", b"rank 3", b"rank 5").unwrap(), b"rank 5");
    assert_eq!(store.compare_set("absent", b"something", b"new").unwrap(), b"something");
    assert!(!store.check(&["absent"]).unwrap());
}

#[test]
fn attempts_under_their_own_prefixes_do_not_meet() {
    let server = StoreServer::bind(0).unwrap();
    let store = client(&server);
    let (first, second) = (store.prefixed("attempt-0/"), store.prefixed("attempt-1/"));
    first.set("address", b"old").unwrap();
    assert!(!second.check(&["address"]).unwrap());
    second.prefixed("deep/").set("x", b"y").unwrap();
    assert_eq!(store.get("attempt-0/address", LONG).unwrap(), b"old");
    assert_eq!(store.reconnect().unwrap().get("attempt-1/deep/x", LONG).unwrap(), b"y");
    assert_eq!(
        second.reconnect().unwrap().get("deep/x", LONG).unwrap(),
        b"y",
        "a prefix outlives reconnecting"
    );
}

#[test]
fn a_wait_that_times_out_names_its_keys_and_leaves_the_connection_in_order() {
    let server = StoreServer::bind(0).unwrap();
    let store = client(&server);
    let address = format!("127.0.0.1:{}", server.port());
    for _ in 0..3 {
        let error = store.prefixed("ranks/").get("7", SHORT).unwrap_err();
        let (address, keys) = (address.clone(), vec!["ranks/7".to_owned()]);
        assert_eq!(error, StoreError::Timeout { address, keys, waited: SHORT });
    }
    // A reply to a cancelled wait would be taken for the reply to these.
    store.set("ranks/7", b"here").unwrap();
    assert_eq!(store.add("n", 41).unwrap(), 41);
    assert_eq!(store.get("ranks/7", SHORT).unwrap(), b"here");
}

#[test]
fn a_wait_and_its_key_may_cross() {
    // The key is set just when the wait is cancelled: one or both are answered, and the next
    // request gets its own reply.
    let server = StoreServer::bind(0).unwrap();
    let together = &Barrier::new(2);
    std::thread::scope(|scope| {
        let (waiting, setting) = (client(&server), client(&server));
        scope.spawn(move || {
            for i in 0..100 {
                together.wait();
                std::thread::sleep(Duration::from_millis(1));
                setting.set(&format!("key-{i}"), b"x").unwrap();
            }
        });
        for i in 0..100 {
            together.wait();
            match waiting.wait(&[&format!("key-{i}")], Duration::from_millis(1)) {
                Ok(()) | Err(StoreError::Timeout { .. }) => {}
                Err(error) => panic!("{error}"),
            }
            assert_eq!(waiting.add("n", 1).unwrap(), i + 1);
        }
    });
}

#[test]
fn garbage_ends_its_own_connection_only() {
    let server = StoreServer::bind(0).unwrap();
    let store = client(&server);
    store.set("kept", b"value").unwrap();
    let validate = [0, 0xCE, 0xF7, 0x85, 0x3C];
    let after_validation = |bytes: &[u8]| [&validate, bytes].concat();
    let length = |n: u64| n.to_le_bytes();
    let cases = [
        ("a request without validation", vec![13, 1, 2, 3, 4]),
        ("another program's greeting", b"GET / HTTP/1.1\r\n\r\n".to_vec()),
        ("a wrong magic number", vec![0, 1, 2, 3, 4]),
        ("an unknown opcode", after_validation(&[200])),
        ("an opcode of later versions", after_validation(&[14])),
        ("a key of 2^64 - 1 bytes", after_validation(&[&[1][..], &length(u64::MAX)].concat())),
        ("a value of 1 TiB", after_validation(&[&[1][..], &length(1), b"k", &length(1 << 40)].concat())),
        ("2^40 keys", after_validation(&[&[6][..], &length(1 << 40)].concat())),
        ("get of an absent key", after_validation(&[&[3][..], &length(1), b"k"].concat())),
    ];
    for (what, bytes) in cases {
        let mut stream = TcpStream::connect(("127.0.0.1", server.port())).unwrap();
        stream.write_all(&bytes).unwrap();
        // Disconnected: an end, or a reset because not everything was read.
        let mut rest = Vec::new();
        let _ = stream.read_to_end(&mut rest);
        assert!(rest.is_empty(), "{what} was answered with {rest:?}");
    }
    // A client that leaves in the middle of a request, and one in the middle of a wait.
    for bytes in [&[1u8, 9][..], &[&[6][..], &length(1), &length(4), b"kept"].concat()] {
        let mut stream = TcpStream::connect(("127.0.0.1", server.port())).unwrap();
        stream.write_all(&after_validation(bytes)).unwrap();
    }
    assert_eq!(store.get("kept", LONG).unwrap(), b"value");
    assert_eq!(client(&server).get("kept", LONG).unwrap(), b"value");
}

#[test]
fn what_is_too_long_is_not_sent() {
    let server = StoreServer::bind(0).unwrap();
    let store = client(&server);
    let too_long = |result| assert!(matches!(result, Err(StoreError::TooLong { .. })), "{result:?}");
    too_long(store.set("key", &vec![0; (8 << 20) + 1]));
    too_long(store.set(&"k".repeat(9000), b""));
    store.set("key", &vec![1; 8 << 20]).unwrap();
    assert_eq!(store.get("key", LONG).unwrap().len(), 8 << 20);
}

#[test]
fn a_client_may_come_before_its_server() {
    let port = StoreServer::bind(0).unwrap().port();
    let store = std::thread::spawn(move || Store::connect("127.0.0.1", port, LONG).unwrap());
    std::thread::sleep(Duration::from_millis(150));
    let server = StoreServer::bind(port).unwrap();
    store.join().unwrap().set("here", b"").unwrap();
    client(&server).wait(&["here"], LONG).unwrap();
}

#[test]
fn nobody_another_program_and_silence_are_told_apart() {
    let port = StoreServer::bind(0).unwrap().port();
    let error = Store::connect("127.0.0.1", port, SHORT).err().unwrap();
    assert!(
        matches!(&error, StoreError::Unreachable { address, .. } if *address == format!("127.0.0.1:{port}"))
    );
    assert!(error.to_string().contains("refused"), "{error}");

    let unknown = Store::connect("no-such-host.invalid", 1, SHORT).err().unwrap();
    assert!(unknown.to_string().contains("no-such-host.invalid:1"), "{unknown}");

    let other = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let port = other.local_addr().unwrap().port();
    let silent = Store::connect("127.0.0.1", port, SHORT).err().unwrap();
    assert!(silent.to_string().contains("no reply to the greeting"), "{silent}");
    drop(other);

    let other = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let port = other.local_addr().unwrap().port();
    std::thread::spawn(move || {
        let (mut stream, _) = other.accept().unwrap();
        stream.write_all(b"HTTP/1.1 400 Bad Request\r\n\r\n").unwrap();
        // Kept open until the client has read.
        let _ = stream.read_to_end(&mut Vec::new());
    });
    let error = Store::connect("127.0.0.1", port, LONG).err().unwrap();
    assert!(matches!(error, StoreError::NotAStore { .. }), "{error}");
}

#[test]
fn a_server_that_ends_is_named() {
    let server = StoreServer::bind(0).unwrap();
    let store = client(&server);
    let waiting = std::thread::spawn({
        let store = client(&server);
        move || store.get("never", LONG)
    });
    store.set("x", b"").unwrap();
    drop(server);
    let error = waiting.join().unwrap().unwrap_err();
    assert!(matches!(&error, StoreError::Lost { request, .. } if request.contains("never")), "{error}");
    assert!(matches!(store.add("x", 1), Err(StoreError::Lost { .. })));
    assert!(matches!(store.add("x", 1), Err(StoreError::Lost { .. })), "and stays lost");
}

#[test]
fn a_port_is_served_once() {
    let server = StoreServer::bind(0).unwrap();
    let error = StoreServer::bind(server.port()).err().unwrap();
    assert!(matches!(error, StoreError::Bind { port, .. } if port == server.port()), "{error}");
}

/// PyTorch's client and server, run by the interpreter in `TANDEM_TEST_PYTHON`.
const PEER: &str = r#"
import sys, datetime
from torch.distributed import TCPStore, PrefixStore
long = datetime.timedelta(seconds=60)

def talk(store):
    store.set("from-python", b"\x00\x01\xff")
    assert store.get("from-rust") == b"rust\x00\xff"
    assert store.add("count", 5) == 12, store.get("count")
    assert store.compare_set("first", "", "python") == b"rust"
    assert PrefixStore("attempt-1", store).get("key") == b"prefixed"
    assert store.check(["from-rust"]) and not store.check(["absent"])
    try:
        store.wait(["absent"], datetime.timedelta(milliseconds=50))
        raise SystemExit("a wait for nothing ended")
    except Exception as error:
        assert "absent" in str(error) or "imeout" in str(error), error
    assert store.delete_key("from-rust") and not store.delete_key("from-rust")
    store.multi_set(["m1", "m2"], ["one", "two"])
    assert store.multi_get(["m1", "m2"]) == [b"one", b"two"]
    store.append("m1", "+"); assert store.get("m1") == b"one+"
    assert store.num_keys() >= 5
    store.set("python-done", "")

if sys.argv[1] == "serve":
    store = TCPStore("127.0.0.1", 0, is_master=True, timeout=long, use_libuv=sys.argv[2] == "uv")
    print(store.port, flush=True)
    talk(store)
    sys.stdin.read()
else:
    talk(TCPStore("127.0.0.1", int(sys.argv[1]), is_master=False, timeout=long, use_libuv=sys.argv[2] == "uv"))
"#;

/// The Rust side of `talk`.
fn talk(store: &Store) {
    store.prefixed("attempt-1/").set("key", b"prefixed").unwrap();
    assert_eq!(store.add("count", 7).unwrap(), 7);
    assert_eq!(store.compare_set("first", b"", b"rust").unwrap(), b"rust");
    assert!(matches!(store.get("absent", SHORT), Err(StoreError::Timeout { .. })));
    store.set("from-rust", b"rust\x00\xff").unwrap();
    assert_eq!(store.get("from-python", LONG).unwrap(), b"\x00\x01\xff");
    store.wait(&["python-done", "m1", "m2"], LONG).unwrap();
    assert!(!store.check(&["from-rust"]).unwrap());
    assert!(store.delete("m2").unwrap());
    assert_eq!(store.add("count", 0).unwrap(), 12);
}

#[test]
fn both_sides_understand_pytorch() {
    let Some(python) = std::env::var_os("TANDEM_TEST_PYTHON") else {
        eprintln!("skipped: TANDEM_TEST_PYTHON names no interpreter with PyTorch to compare with");
        return;
    };
    let start = |first: &str, backend: &str| {
        let mut command = Command::new(&python);
        command.args(["-c", PEER, first, backend]).stdin(Stdio::piped()).stdout(Stdio::piped());
        command.spawn().expect("TANDEM_TEST_PYTHON starts")
    };
    for backend in ["uv", "threads"] {
        // PyTorch's client, this server.
        let server = StoreServer::bind(0).unwrap();
        let mut peer = start(&server.port().to_string(), backend);
        talk(&client(&server));
        assert!(peer.wait().unwrap().success());

        // This client, PyTorch's server.
        let mut peer = start("serve", backend);
        let mut port = String::new();
        let mut output = std::io::BufReader::new(peer.stdout.take().unwrap());
        std::io::BufRead::read_line(&mut output, &mut port).unwrap();
        talk(&Store::connect("127.0.0.1", port.trim().parse().unwrap(), LONG).unwrap());
        drop(peer.stdin.take());
        assert!(peer.wait().unwrap().success());
    }
}
