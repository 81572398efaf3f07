//! TensorBoard's messages, as far as they are written here, and their framing as TFRecords.
//!
//! Sources: `event.proto`, `summary.proto` and `tensor.proto` of TensorFlow; the framing is that of
//! `tensorflow/core/lib/io/record_writer.h`: length, masked checksum of the length, bytes, masked
//! checksum of the bytes. Checksums are CRC-32C.

use prost::{Message, Oneof};

/// Type of strings in a tensor.
const DT_STRING: i32 = 7;

#[derive(Clone, PartialEq, Message)]
pub(super) struct Event {
    /// Seconds since 1970.
    #[prost(double, tag = "1")]
    pub wall_time: f64,
    #[prost(int64, tag = "2")]
    pub step: i64,
    #[prost(oneof = "What", tags = "3, 5, 7")]
    pub what: Option<What>,
}

#[derive(Clone, PartialEq, Oneof)]
pub(super) enum What {
    #[prost(string, tag = "3")]
    FileVersion(String),
    #[prost(message, tag = "5")]
    Summary(Summary),
    #[prost(message, tag = "7")]
    SessionLog(SessionLog),
}

/// Begin of a session: readers drop what has its step or a later one.
#[derive(Clone, PartialEq, Message)]
pub(super) struct SessionLog {
    #[prost(int32, tag = "1")]
    pub status: i32,
}

impl SessionLog {
    pub(super) const START: Self = Self { status: 1 };
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct Summary {
    #[prost(message, repeated, tag = "1")]
    pub value: Vec<Value>,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct Value {
    #[prost(string, tag = "1")]
    pub tag: String,
    #[prost(float, optional, tag = "2")]
    pub simple_value: Option<f32>,
    #[prost(message, optional, tag = "8")]
    pub tensor: Option<Tensor>,
    #[prost(message, optional, tag = "9")]
    pub metadata: Option<Metadata>,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct Metadata {
    #[prost(message, optional, tag = "1")]
    pub plugin_data: Option<PluginData>,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct PluginData {
    #[prost(string, tag = "1")]
    pub plugin_name: String,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct Tensor {
    #[prost(int32, tag = "1")]
    pub dtype: i32,
    #[prost(message, optional, tag = "2")]
    pub shape: Option<Shape>,
    #[prost(bytes = "vec", repeated, tag = "8")]
    pub strings: Vec<Vec<u8>>,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct Shape {
    #[prost(message, repeated, tag = "2")]
    pub dim: Vec<Dim>,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct Dim {
    #[prost(int64, tag = "1")]
    pub size: i64,
}

impl Value {
    pub(super) fn scalar(tag: String, value: f64) -> Self {
        Self { tag, simple_value: Some(value as f32), tensor: None, metadata: None }
    }

    /// A text in Markdown.
    pub(super) fn text(tag: &str, text: String) -> Self {
        let tensor = Tensor {
            dtype: DT_STRING,
            shape: Some(Shape { dim: vec![Dim { size: 1 }] }),
            strings: vec![text.into_bytes()],
        };
        let plugin = PluginData { plugin_name: "text".to_owned() };
        let metadata = Metadata { plugin_data: Some(plugin) };
        Self { tag: tag.to_owned(), simple_value: None, tensor: Some(tensor), metadata: Some(metadata) }
    }
}

/// Appends an event as a TFRecord.
pub(super) fn append(event: &Event, to: &mut Vec<u8>) {
    let bytes = event.encode_to_vec();
    let length = (bytes.len() as u64).to_le_bytes();
    to.extend_from_slice(&length);
    to.extend_from_slice(&masked_crc(&length).to_le_bytes());
    to.extend_from_slice(&bytes);
    to.extend_from_slice(&masked_crc(&bytes).to_le_bytes());
}

/// CRC-32C, rotated and shifted, because checksums of texts with checksums are weak.
fn masked_crc(bytes: &[u8]) -> u32 {
    crc32c::crc32c(bytes).rotate_right(15).wrapping_add(0xa282_ead8)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Bytes of `tensorboard.summary.writer.record_writer.RecordWriter` for
    /// `Event(wall_time=1.5, step=3, summary=Summary(value=[Summary.Value(tag="train/loss", simple_value=0.25)]))`.
    #[test]
    fn a_scalar_has_tensorboards_bytes() {
        let summary = Summary { value: vec![Value::scalar("train/loss".to_owned(), 0.25)] };
        let event = Event { wall_time: 1.5, step: 3, what: Some(What::Summary(summary)) };
        let mut bytes = Vec::new();
        append(&event, &mut bytes);
        let expected = b" \0\0\0\0\0\0\0)\xed\xa9P\t\0\0\0\0\0\0\xf8?\x10\x03*\x13\n\x11\n\ntrain/loss\x15\0\0\x80>C0\x1b\x92";
        assert_eq!(bytes, expected);
    }
}
