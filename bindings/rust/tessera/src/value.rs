//! Values in a checkpoint, and their typed JSON (docs/FORMAT.md), which all languages read.

use base64::prelude::{Engine as _, BASE64_STANDARD};
use serde::Deserialize as _;
use serde_json::{json, Map, Number};

use crate::error::{Error, Result};

/// A value that a checkpoint stores in addition to its tensors. A load returns it unchanged: integers stay integers, tuples
/// tuples, NaN is NaN.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub enum Value {
    /// Python's `None`.
    Null,
    /// A boolean.
    Bool(bool),
    /// An integer of 64 bits.
    Int(i64),
    /// An integer beyond 64 bits, in decimal digits.
    BigInt(String),
    /// A floating-point number, NaN and infinities included.
    Double(f64),
    /// Text.
    Str(String),
    /// Bytes.
    Bytes(Vec<u8>),
    /// A list.
    List(Vec<Value>),
    /// Python's `tuple`.
    Tuple(Vec<Value>),
    /// Pairs of key and value in their order. Keys differ from each other.
    Map(Vec<(Value, Value)>),
}

macro_rules! from {
    ($($type:ty => $variant:ident),*) => {
        $(impl From<$type> for Value {
            fn from(value: $type) -> Self {
                Value::$variant(value.into())
            }
        })*
    };
}
from! { bool => Bool, i32 => Int, u32 => Int, i64 => Int, f32 => Double, f64 => Double, &str => Str, String => Str,
Vec<u8> => Bytes, Vec<Value> => List }

impl Value {
    pub(crate) fn to_json(&self) -> Result<String> {
        Ok(encode(self, 0)?.to_string())
    }

    pub(crate) fn from_json(text: &str) -> Result<Self> {
        decode(parse(text)?).ok_or_else(|| bad(text, "it is not typed JSON"))
    }

    /// Of JSON without types: an object is a map of strings.
    pub(crate) fn from_plain_json(text: &str) -> Result<Self> {
        Ok(plain(parse(text)?))
    }

    /// The value of a key of a map. `None` if the key is missing, or this is not a map.
    pub fn get(&self, key: &str) -> Option<&Value> {
        let Value::Map(pairs) = self else { return None };
        pairs.iter().find(|(name, _)| matches!(name, Value::Str(name) if name == key)).map(|(_, value)| value)
    }
}

fn parse(text: &str) -> Result<serde_json::Value> {
    // The library has limited the depth; serde_json's own limit is below what tags may add.
    let mut parser = serde_json::Deserializer::from_str(text);
    parser.disable_recursion_limit();
    serde_json::Value::deserialize(&mut parser).map_err(|error| bad(text, &error.to_string()))
}

fn bad(text: &str, why: &str) -> Error {
    Error::argument(format!("the value {text} cannot be read: {why}"))
}

/// What the library takes; checked here too, for deeper recursion could end the process.
const MAX_DEPTH: usize = 64;

fn encode(value: &Value, depth: usize) -> Result<serde_json::Value> {
    if depth > MAX_DEPTH {
        return Err(Error::argument(format!("a value is nested more than {MAX_DEPTH} levels deep")));
    }
    let list = |items: &[Value]| items.iter().map(|item| encode(item, depth + 1)).collect::<Result<Vec<_>>>();
    Ok(match value {
        Value::Null => serde_json::Value::Null,
        Value::Bool(value) => json!(value),
        Value::Int(value) => json!(value),
        Value::BigInt(digits) => big(digits)?,
        Value::Double(value) => match Number::from_f64(*value) {
            Some(number) => serde_json::Value::Number(number),
            None if value.is_nan() => tagged("double", json!("nan")),
            None => tagged("double", json!(if *value > 0.0 { "inf" } else { "-inf" })),
        },
        Value::Str(value) => json!(value),
        Value::Bytes(bytes) => tagged("bytes", json!(BASE64_STANDARD.encode(bytes))),
        Value::List(items) => serde_json::Value::Array(list(items)?),
        Value::Tuple(items) => tagged("tuple", serde_json::Value::Array(list(items)?)),
        Value::Map(pairs) => map(pairs, depth + 1)?,
    })
}

/// A plain object where all keys are strings, and none is the tag.
fn map(pairs: &[(Value, Value)], depth: usize) -> Result<serde_json::Value> {
    let mut object = Map::new();
    for (key, value) in pairs {
        match key {
            Value::Str(key) if key != "~" => {
                if object.insert(key.clone(), encode(value, depth)?).is_some() {
                    return Err(Error::argument(format!("the key {key:?} occurs twice in a map")));
                }
            }
            _ => {
                let pairs = pairs
                    .iter()
                    .map(|(key, value)| Ok(json!([encode(key, depth)?, encode(value, depth)?])))
                    .collect::<Result<Vec<_>>>()?;
                return Ok(tagged("map", serde_json::Value::Array(pairs)));
            }
        }
    }
    Ok(serde_json::Value::Object(object))
}

/// Small integers have their plain form, so that equal numbers are written alike.
fn big(digits: &str) -> Result<serde_json::Value> {
    let (sign, number) = digits.strip_prefix('-').map_or(("", digits), |number| ("-", number));
    if number.is_empty() || !number.bytes().all(|byte| byte.is_ascii_digit()) {
        return Err(Error::argument(format!("{digits:?} is not a decimal integer")));
    }
    let text = format!("{sign}{}", number.trim_start_matches('0'));
    if matches!(text.as_str(), "" | "-") {
        return Ok(json!(0));
    }
    Ok(text.parse::<i64>().map_or_else(|_| tagged("int", json!(text)), |small| json!(small)))
}

fn tagged(kind: &str, content: serde_json::Value) -> serde_json::Value {
    json!({"~": kind, "v": content})
}

fn plain(json: serde_json::Value) -> Value {
    use serde_json::Value as Json;
    match json {
        Json::Null => Value::Null,
        Json::Bool(value) => Value::Bool(value),
        Json::Number(number) => match (number.as_i64(), number.as_f64()) {
            (Some(value), _) => Value::Int(value),
            (None, Some(value)) if number.is_f64() => Value::Double(value),
            _ => Value::BigInt(number.to_string()),
        },
        Json::String(value) => Value::Str(value),
        Json::Array(items) => Value::List(items.into_iter().map(plain).collect()),
        Json::Object(object) => {
            Value::Map(object.into_iter().map(|(key, value)| (Value::Str(key), plain(value))).collect())
        }
    }
}

fn decode(json: serde_json::Value) -> Option<Value> {
    use serde_json::Value as Json;
    let list = |items: Vec<Json>| items.into_iter().map(decode).collect::<Option<Vec<_>>>();
    Some(match json {
        Json::Null => Value::Null,
        Json::Bool(value) => Value::Bool(value),
        Json::Number(number) => match number.as_i64() {
            Some(value) => Value::Int(value),
            None => Value::Double(number.as_f64()?),
        },
        Json::String(value) => Value::Str(value),
        Json::Array(items) => Value::List(list(items)?),
        Json::Object(mut object) => match object.get("~").cloned() {
            None => {
                let pairs = object.into_iter().map(|(key, value)| Some((Value::Str(key), decode(value)?)));
                Value::Map(pairs.collect::<Option<_>>()?)
            }
            Some(kind) => match (kind.as_str()?, object.remove("v")?) {
                ("bytes", Json::String(text)) => Value::Bytes(BASE64_STANDARD.decode(text).ok()?),
                ("int", Json::String(text)) => Value::BigInt(text),
                ("double", Json::String(text)) => Value::Double(match text.as_str() {
                    "nan" => f64::NAN,
                    "inf" => f64::INFINITY,
                    "-inf" => f64::NEG_INFINITY,
                    _ => return None,
                }),
                ("tuple", Json::Array(items)) => Value::Tuple(list(items)?),
                ("map", Json::Array(items)) => {
                    let pairs = items.into_iter().map(|pair| match pair {
                        Json::Array(pair) => {
                            let [key, value]: [Json; 2] = pair.try_into().ok()?;
                            Some((decode(key)?, decode(value)?))
                        }
                        _ => None,
                    });
                    Value::Map(pairs.collect::<Option<_>>()?)
                }
                _ => return None,
            },
        },
    })
}

#[cfg(test)]
mod tests {
    use super::Value;

    #[test]
    fn every_kind_survives_json() {
        let value = Value::Map(vec![
            (Value::Str("plain".into()), Value::List(vec![Value::Null, true.into(), 7i64.into(), 0.1.into()])),
            (Value::Str("text".into()), "\u{1f600} \"quoted\"\n".into()),
            (Value::Str("bytes".into()), vec![0u8, 255, 16].into()),
            (Value::Str("tuple".into()), Value::Tuple(vec![i64::MIN.into(), 1.0.into()])),
            (Value::Str("big".into()), Value::BigInt("-170141183460469231731687303715884105728".into())),
            (
                Value::Str("keys".into()),
                Value::Map(vec![(3i64.into(), "three".into()), ("~".into(), f64::INFINITY.into())]),
            ),
        ]);
        assert_eq!(Value::from_json(&value.to_json().unwrap()).unwrap(), value);
        let nan = Value::from_json(&Value::Double(f64::NAN).to_json().unwrap()).unwrap();
        assert!(matches!(nan, Value::Double(number) if number.is_nan()));
    }

    #[test]
    fn integers_and_doubles_stay_apart() {
        assert_eq!(Value::Double(1.0).to_json().unwrap(), "1.0");
        assert_eq!(Value::Int(1).to_json().unwrap(), "1");
        assert_eq!(Value::from_json("1e300").unwrap(), Value::Double(1e300));
        let shortest = 0.1f64 + 0.2;
        assert_eq!(Value::from_json(&Value::Double(shortest).to_json().unwrap()).unwrap(), Value::Double(shortest));
    }

    #[test]
    fn plain_json_has_no_types() {
        let value =
            Value::from_plain_json(r#"{"~": "int", "v": [1, 1.0, 18446744073709551615, null, {"w": true}]}"#).unwrap();
        let items = [1.into(), 1.0.into(), Value::BigInt(u64::MAX.to_string()), Value::Null];
        assert_eq!(value.get("~"), Some(&"int".into()));
        let Some(Value::List(found)) = value.get("v") else { panic!("{value:?}") };
        assert_eq!((&found[..4], found[4].get("w"), found[4].get("v")), (&items[..], Some(&true.into()), None));
        assert_eq!(Value::Null.get("v"), None);
    }

    #[test]
    fn what_cannot_be_said_is_refused() {
        assert!(Value::BigInt("12x".into()).to_json().is_err());
        assert!(Value::Map(vec![("a".into(), Value::Null), ("a".into(), Value::Null)]).to_json().is_err());
        assert!(Value::from_json(r#"{"~":"set","v":[]}"#).is_err());
        assert_eq!(Value::BigInt("0042".into()).to_json().unwrap(), "42");
    }
}
