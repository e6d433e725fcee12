//! The key-value store.

mod common;

use std::thread;
use std::time::Duration;

use common::{deadline, options, serve};
use tessera::{Code, Store, StoreOptions, StoreServer};

fn every_operation(store: &Store) {
    assert_eq!(store.get("a").unwrap(), None);
    store.set("a", b"first").unwrap();
    assert_eq!(store.get("a").unwrap().unwrap(), b"first");
    store.set("empty", b"").unwrap();
    assert_eq!(store.get("empty").unwrap().unwrap(), b"");
    let long = vec![7u8; 3 << 20];
    store.set("long", &long).unwrap();
    assert_eq!(store.get("long").unwrap().unwrap(), long);

    assert_eq!(store.add("n", 5).unwrap(), 5);
    assert_eq!(store.add("n", -7).unwrap(), -2);
    assert_eq!(store.get("n").unwrap().unwrap(), b"-2");
    assert_eq!(store.add("a", 1).unwrap_err().code(), Code::InvalidArgument);

    assert!(!store.compare_set("a", None, b"x").unwrap());
    assert!(!store.compare_set("a", Some(b"second"), b"x").unwrap());
    assert!(store.compare_set("a", Some(b"first"), b"second").unwrap());
    assert!(store.compare_set("new", None, b"1").unwrap());

    assert!(store.delete("a").unwrap());
    assert!(!store.delete("a").unwrap());
    store.wait("new", None).unwrap();
    let error = store.wait("never", Some(Duration::from_millis(20))).unwrap_err();
    assert_eq!(error.code(), Code::Timeout);
    assert!(error.message().contains("never"), "{error}");
    assert_eq!(store.set("zero\0byte", b"").unwrap_err().code(), Code::InvalidArgument);
    assert_eq!(store.set(&"k".repeat(2000), b"").unwrap_err().code(), Code::InvalidArgument);
}

#[test]
fn every_operation_works_over_tcp() {
    let (_server, uri) = serve();
    every_operation(&Store::open(&uri, &options()).unwrap());
}

#[test]
fn every_operation_works_over_files() {
    let folder = tempfile::tempdir().unwrap();
    every_operation(&Store::open(&format!("file://{}", folder.path().display()), &options()).unwrap());
}

#[test]
fn many_threads_share_one_connection() {
    let (_server, uri) = serve();
    let store = Store::open(&uri, &options()).unwrap();
    thread::scope(|scope| {
        let waiting = scope.spawn(|| store.wait("ready", Some(deadline())).unwrap());
        for _ in 0..4 {
            scope.spawn(|| (0..50).for_each(|_| assert!(store.add("sum", 1).unwrap() > 0)));
        }
        store.set("ready", b"1").unwrap();
        waiting.join().unwrap();
    });
    assert_eq!(store.add("sum", 0).unwrap(), 200);
}

#[test]
fn a_wrong_token_is_refused() {
    let (_server, uri) = serve();
    let wrong = StoreOptions::new().token("00".repeat(32)).timeout(Duration::from_secs(5));
    let error = Store::open(&uri, &wrong).unwrap_err();
    assert_eq!(error.code(), Code::Permission, "{error:?}");
    let malformed = StoreOptions::new().token("not hexadecimal");
    assert!(matches!(Store::open(&uri, &malformed).unwrap_err().code(), Code::InvalidArgument | Code::Permission));
}

#[test]
fn without_a_token_there_is_advice() {
    let error = Store::open("tcp://192.0.2.1:1", &StoreOptions::new().timeout(Duration::from_secs(5))).unwrap_err();
    assert_eq!(error.code(), Code::Permission, "{error:?}");
    assert!(error.message().contains("TESSERA_TOKEN_FILE"), "{error}");
}

#[test]
fn another_job_or_epoch_is_refused() {
    let (_server, uri) = serve();
    let limit = Duration::from_secs(5);
    let other_job = StoreOptions::new().token("5a".repeat(32)).job_id("another").timeout(limit);
    assert!(Store::open(&uri, &other_job).is_err());
    let other_epoch = StoreOptions::new().token("5a".repeat(32)).epoch(3).timeout(limit);
    assert!(Store::open(&uri, &other_epoch).is_err());
}

#[test]
fn nobody_answering_is_a_timeout() {
    let port = {
        let (server, _) = serve();
        server.port().unwrap() // free again when the server is gone
    };
    let impatient = options().timeout(Duration::from_millis(200));
    let error = Store::open(&format!("tcp://127.0.0.1:{port}"), &impatient).unwrap_err();
    assert!(matches!(error.code(), Code::Timeout | Code::Io), "{error:?}");
}

#[test]
fn an_address_in_use_and_a_wrong_one_are_named() {
    let (server, _) = serve();
    let error = StoreServer::bind("127.0.0.1", server.port().unwrap(), &options()).unwrap_err();
    assert_eq!(error.code(), Code::Io);
    assert!(matches!(error.native(), Some(tessera::Native::Errno(_))), "{error:?}");
    assert_eq!(Store::open("http://127.0.0.1", &options()).unwrap_err().code(), Code::InvalidArgument);
}

#[test]
fn an_insecure_store_needs_no_token() {
    let open = StoreOptions::new().insecure(true).timeout(deadline());
    let server = StoreServer::bind("127.0.0.1", 0, &open).unwrap();
    let store = Store::open(&format!("tcp://127.0.0.1:{}", server.port().unwrap()), &open).unwrap();
    store.set("a", b"1").unwrap();
    drop(server);
    assert!(store.set("a", b"2").is_err());
}
