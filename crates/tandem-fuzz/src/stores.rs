//! Both ends of the rendezvous store's protocol.

use std::io::{Read, Write};
use std::net::{Ipv4Addr, Shutdown, TcpListener, TcpStream};
use std::time::Duration;

use tandem_comm::store::{Store, StoreServer};

/// Bound on a reply. Nothing waits for it: the other end closes the connection first.
const PATIENCE: Duration = Duration::from_secs(60);

/// Sends bytes to a server as a client's requests, and reads until the server hangs up.
pub(crate) fn server(bytes: &[u8]) {
    let server = StoreServer::bind(0).expect("a free port");
    let mut stream = TcpStream::connect((Ipv4Addr::LOCALHOST, server.port())).expect("the server");
    // A server that hung up refuses what follows, which is one of the right ends.
    let _ = stream.write_all(bytes).and_then(|()| stream.shutdown(Shutdown::Write));
    let _ = stream.read_to_end(&mut Vec::new());
}

/// Answers a client's requests with bytes, after the greeting.
pub(crate) fn client(bytes: &[u8]) {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).expect("a free port");
    let port = listener.local_addr().expect("a bound port").port();
    std::thread::scope(|scope| {
        scope.spawn(move || {
            let (mut stream, _) = listener.accept().expect("the client");
            // A store answers the greeting with 0 or 1.
            let sent = stream.write_all(&[1]).and_then(|()| stream.write_all(bytes));
            let _ = sent.and_then(|()| stream.shutdown(Shutdown::Write));
            let _ = stream.read_to_end(&mut Vec::new());
        });
        let Ok(store) = Store::connect("127.0.0.1", port, PATIENCE) else { return };
        // The first request that fails closes the connection, and every later one fails at once.
        let _ = store.set("a", b"1");
        let _ = store.get("a", PATIENCE);
        let _ = store.add("b", 1);
        let _ = store.check(&["a", "b"]);
        let _ = store.compare_set("a", b"1", b"2");
        let _ = store.delete("a");
        let _ = store.wait(&["a"], PATIENCE);
    });
}
