//! Ranks as threads, each with a communicator of its own, over one store.
#![allow(dead_code)]

use std::env;
use std::future::Future;
use std::pin::pin;
use std::sync::Arc;
use std::task::{Context, Poll, Wake, Waker};
use std::thread::{self, Thread};
use std::time::Duration;

use tessera::{Comm, CommOptions, Store, StoreOptions, StoreServer};

/// How long tests wait for what has to happen, on a machine that may be slow: what tests/patience.hpp is in C++. A timeout
/// that is itself under test stays as it is.
pub fn patience(span: Duration) -> Duration {
    let factor = env::var("TESSERA_TEST_PATIENCE").map_or(1.0, |given| given.parse().unwrap());
    assert!(factor >= 1.0, "TESSERA_TEST_PATIENCE is {factor}; at least 1");
    span.mul_f64(factor)
}

pub fn deadline() -> Duration {
    patience(Duration::from_secs(30))
}

/// Serves a store on loopback that all who know `options()` may use.
pub fn serve() -> (StoreServer, String) {
    let server = StoreServer::bind("127.0.0.1", 0, &options()).unwrap();
    let uri = format!("tcp://127.0.0.1:{}", server.port().unwrap());
    (server, uri)
}

pub fn options() -> StoreOptions {
    StoreOptions::new().token("5a".repeat(32)).timeout(deadline())
}

/// Runs `body` on `n` ranks and returns what each returned. A rank that panics fails the test.
pub fn ranks<R: Send>(n: usize, body: impl Fn(Comm) -> R + Sync) -> Vec<R> {
    ranks_with(n, &CommOptions::new().timeout(deadline()), body)
}

pub fn ranks_with<R: Send>(n: usize, settings: &CommOptions, body: impl Fn(Comm) -> R + Sync) -> Vec<R> {
    let (_server, uri) = serve();
    thread::scope(|scope| {
        let threads: Vec<_> = (0..n)
            .map(|rank| {
                let (uri, body) = (&uri, &body);
                scope.spawn(move || {
                    let store = Store::open(uri, &options()).unwrap();
                    body(Comm::create(&store, rank, n, settings).unwrap())
                })
            })
            .collect();
        threads.into_iter().map(|thread| thread.join().expect("a rank panicked")).collect()
    })
}

pub fn alone() -> Comm {
    let (_server, uri) = serve();
    let store = Store::open(&uri, &options()).unwrap();
    Comm::create(&store, 0, 1, &CommOptions::new().timeout(deadline())).unwrap()
}

/// Polls a future to its end on this thread, without any runtime.
pub fn block_on<F: Future>(future: F) -> F::Output {
    struct Unpark(Thread);
    impl Wake for Unpark {
        fn wake(self: Arc<Self>) {
            self.0.unpark();
        }
    }
    let waker = Waker::from(Arc::new(Unpark(thread::current())));
    let mut future = pin!(future);
    loop {
        match future.as_mut().poll(&mut Context::from_waker(&waker)) {
            Poll::Ready(output) => return output,
            Poll::Pending => thread::park_timeout(deadline()),
        }
    }
}
