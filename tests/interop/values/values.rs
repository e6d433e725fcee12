//! Every kind of value as Rust has it, for test_values.py: saves them, or resumes what any language saved and compares.
//! Arguments: `save` or `check`, and the root. Under each name rank 0's value, and under "own.<name>" one of every rank.

use std::env;

use tessera::{Comm, Saver, State, Value};

fn tuple<const N: usize>(items: [Value; N]) -> Value {
    Value::Tuple(items.into())
}

fn list<const N: usize>(items: [Value; N]) -> Value {
    Value::List(items.into())
}

fn map<const N: usize>(pairs: [(Value, Value); N]) -> Value {
    Value::Map(pairs.into())
}

fn big(digits: &str) -> Value {
    Value::BigInt(digits.into())
}

fn values() -> Vec<(&'static str, Value)> {
    let beyond_doubles = (1i64 << 53) + 1;
    vec![
        ("null", Value::Null),
        ("true", true.into()),
        ("false", false.into()),
        ("zero", 0.into()),
        ("minus seven", (-7).into()),
        ("beyond doubles", beyond_doubles.into()),
        ("most", i64::MAX.into()),
        ("least", i64::MIN.into()),
        ("big", big("9223372036854775808")),
        ("minus big", big("-9223372036854775809")),
        ("huge", big("1606938044258990275541962092341162602522202993782792835301376")),
        ("whole", 3.0.into()),
        ("minus zero", (-0.0).into()),
        ("sum", (0.1 + 0.2).into()),
        ("exact", 9007199254740992.0.into()),
        ("tricky", 1e23.into()),
        ("largest", f64::MAX.into()),
        ("smallest", 5e-324.into()),
        ("nan", f64::NAN.into()),
        ("inf", f64::INFINITY.into()),
        ("minus inf", f64::NEG_INFINITY.into()),
        ("text", "a \"quoted\" \\ line\n\ttab \0 NUL \x1f \x7f größe 權重 \u{2028} \u{1f600} </".into()),
        ("no text", "".into()),
        ("größe.權重", "größe".into()),
        ("bytes", b"\x00\xff\x80\n\"\\".to_vec().into()),
        ("no bytes", Vec::<u8>::new().into()),
        (
            "list",
            list([
                Value::Null,
                true.into(),
                (-1).into(),
                2.5.into(),
                "ä".into(),
                list([]),
                list([list([beyond_doubles.into()])]),
            ]),
        ),
        ("no list", list([])),
        ("tuple", tuple([1.into(), "a".into(), tuple([2.0.into()]), list([vec![1u8].into()])])),
        ("no tuple", tuple([])),
        (
            "map",
            map([
                ("z".into(), 1.into()),
                (
                    "a".into(),
                    map([("none".into(), Value::Null), ("größe".into(), list([1.0.into(), 2.into(), (-0.0).into()]))]),
                ),
                (
                    "a \"key\"\n".into(),
                    map([("deeper".into(), map([("deepest".into(), tuple([big("9223372036854775808")]))]))]),
                ),
            ]),
        ),
        ("no map", map([])),
        (
            "keys",
            map([
                (3.into(), "int".into()),
                (true.into(), "bool".into()),
                (Value::Null, "null".into()),
                (tuple([1.into(), 2.into()]), "tuple".into()),
                (2.5.into(), "double".into()),
                (b"k".to_vec().into(), "bytes".into()),
                ("s".into(), map([("~".into(), f64::INFINITY.into())])),
            ]),
        ),
        ("tag", map([("~".into(), "no tag".into()), ("v".into(), 1.into())])),
    ]
}

/// As `Debug` tells them, which has NaN equal NaN and 0.0 differ from -0.0.
fn check(state: &State<'_>, name: &str, expected: &Value) -> tessera::Result<()> {
    let got = state.get(name)?;
    assert_eq!(format!("{got:?}"), format!("{expected:?}"), "Rust: {name}");
    Ok(())
}

fn main() -> tessera::Result<()> {
    let [_, action, root] = env::args().collect::<Vec<_>>().try_into().expect("save or check, and the root");
    let comm = Comm::from_env()?;
    let own = format!("rank/{}/own.", comm.rank()?);
    let mut state = State::new();
    for (name, value) in values() {
        let value = if action == "save" { value } else { Value::Null };
        state.set(name, value.clone())?;
        state.set(&format!("{own}{name}"), value)?;
    }
    let saver = Saver::at(&comm, root).open()?;
    if action == "save" {
        saver.save(1, &state)?;
    } else {
        assert_eq!(saver.resume(&mut state)?, 1, "Rust: there is no save");
    }
    for (name, value) in values() {
        check(&state, name, &value)?;
        check(&state, &format!("{own}{name}"), &value)?;
    }
    comm.finalize()
}
