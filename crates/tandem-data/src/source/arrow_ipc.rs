//! Batches of an Arrow IPC stream or file, checked before they are decoded.
//!
//! The decoder takes the places and lengths of buffers from the file. It panics where they are outside
//! of the message, and reserves as much memory as a compressed buffer claims to need.

use std::collections::HashMap;
use std::io::{ErrorKind, Read, Seek, SeekFrom};
use std::sync::Arc;

use arrow_array::{ArrayRef, RecordBatch};
use arrow_buffer::Buffer;
use arrow_data::{BufferSpec, layout};
use arrow_ipc::reader::{read_dictionary, read_footer_length, read_record_batch};
use arrow_ipc::{CompressionType, MessageHeader, convert, root_as_footer, root_as_message};
use arrow_schema::{ArrowError, DataType, SchemaRef};

/// Length of the magic at a file's beginning, with its padding.
const MAGIC: u64 = 8;
/// Bytes at a file's end: the footer's length and the magic.
const TAIL: u64 = 10;
/// Maximum bytes of one decompressed buffer; 32-bit offsets reach no further.
const MAX_BUFFER: u64 = 1 << 31;
/// Maximum ratios of decompressed to compressed bytes: LZ4 has a byte for 255, Zstandard four for 128 KiB.
const LZ4_RATIO: u64 = 256;
const ZSTD_RATIO: u64 = 1 << 15;

type Result<T> = std::result::Result<T, ArrowError>;

/// Reader of the batches of a stream.
pub(super) struct IpcReader<R> {
    input: R,
    schema: SchemaRef,
    dictionaries: HashMap<i64, ArrayRef>,
    ended: bool,
}

/// Metadata and body of a message.
struct Encoded {
    metadata: Vec<u8>,
    body: Buffer,
}

impl<R: Read> IpcReader<R> {
    /// Reads the schema, a stream's first message.
    pub(super) fn new(mut input: R) -> Result<Self> {
        let first = read_message(&mut input)?.ok_or_else(|| broken("it has no schema"))?;
        let message = first.message()?;
        let schema = message.header_as_schema().ok_or_else(|| broken("it does not begin with a schema"))?;
        let schema = Arc::new(convert::try_fb_to_schema(schema)?);
        Ok(Self { input, schema, dictionaries: HashMap::new(), ended: false })
    }

    pub(super) fn schema(&self) -> &SchemaRef {
        &self.schema
    }

    fn next_batch(&mut self) -> Result<Option<RecordBatch>> {
        while let Some(encoded) = read_message(&mut self.input)? {
            let (message, body) = (encoded.message()?, &encoded.body);
            let version = message.version();
            match message.header_type() {
                MessageHeader::RecordBatch => {
                    let batch =
                        message.header_as_record_batch().ok_or_else(|| broken("a batch is missing"))?;
                    let kinds = self.schema.fields().iter().map(|field| field.data_type());
                    check(kinds, &batch, body)?;
                    let schema = Arc::clone(&self.schema);
                    return read_record_batch(body, batch, schema, &self.dictionaries, None, &version)
                        .map(Some);
                }
                MessageHeader::DictionaryBatch => {
                    let missing = || broken("a dictionary is missing");
                    let dictionary = message.header_as_dictionary_batch().ok_or_else(missing)?;
                    #[expect(deprecated, reason = "ids of dictionaries are nowhere else")]
                    let fields = self.schema.fields_with_dict_id(dictionary.id());
                    let Some(DataType::Dictionary(_, kind)) = fields.first().map(|field| field.data_type())
                    else {
                        return Err(broken("a dictionary belongs to no column"));
                    };
                    check([&**kind].into_iter(), &dictionary.data().ok_or_else(missing)?, body)?;
                    read_dictionary(body, dictionary, &self.schema, &mut self.dictionaries, &version)?;
                }
                _ => return Err(broken("a message is neither a batch nor a dictionary")),
            }
        }
        Ok(None)
    }
}

impl<R: Read> Iterator for IpcReader<R> {
    type Item = Result<RecordBatch>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.ended {
            return None;
        }
        let batch = self.next_batch().transpose();
        self.ended = !matches!(batch, Some(Ok(_)));
        batch
    }
}

/// Moves a file to its stream, which lies between magic and footer; returns the stream's length.
pub(super) fn find_stream(file: &mut (impl Read + Seek)) -> Result<u64> {
    let size = file.seek(SeekFrom::End(0))?;
    let cut = || broken("it has no footer");
    let tail = size.checked_sub(TAIL).ok_or_else(cut)?;
    file.seek(SeekFrom::Start(tail))?;
    let mut end = [0; TAIL as usize];
    file.read_exact(&mut end)?;
    let start = tail.checked_sub(read_footer_length(end)? as u64).filter(|start| *start >= MAGIC);
    let start = start.ok_or_else(cut)?;
    file.seek(SeekFrom::Start(start))?;
    let mut footer = Vec::new();
    file.take(tail - start).read_to_end(&mut footer)?;
    root_as_footer(&footer).map_err(|e| broken(&format!("its footer is damaged ({e})")))?;
    file.seek(SeekFrom::Start(MAGIC))?;
    Ok(start - MAGIC)
}

impl Encoded {
    fn message(&self) -> Result<arrow_ipc::Message<'_>> {
        root_as_message(&self.metadata).map_err(|e| broken(&format!("a message is damaged ({e})")))
    }
}

/// Reads a message; `None` at the stream's end.
fn read_message(input: &mut impl Read) -> Result<Option<Encoded>> {
    let mut word = [0; 4];
    match input.read_exact(&mut word) {
        // A stream may end without a mark.
        Err(e) if e.kind() == ErrorKind::UnexpectedEof => return Ok(None),
        found => found?,
    }
    // Streams of Arrow before 0.15 have no such mark.
    if word == [0xff; 4] {
        input.read_exact(&mut word)?;
    }
    let length = i32::from_le_bytes(word);
    if length == 0 {
        return Ok(None);
    }
    let mut encoded = Encoded { metadata: read_bytes(input, length.into())?, body: Buffer::default() };
    let length = encoded.message()?.bodyLength();
    encoded.body = Buffer::from_vec(read_bytes(input, length)?);
    Ok(Some(encoded))
}

/// Reads as many bytes; memory grows with those that are there.
fn read_bytes(input: &mut impl Read, length: i64) -> Result<Vec<u8>> {
    let length = u64::try_from(length).map_err(|_| broken("a message has a negative length"))?;
    let mut bytes = Vec::new();
    input.take(length).read_to_end(&mut bytes)?;
    if bytes.len() as u64 == length {
        return Ok(bytes);
    }
    Err(broken(&format!("a message has {length} bytes, and the file ends after {}", bytes.len())))
}

/// Checks the buffers of a batch whose columns have these types.
fn check<'a>(
    kinds: impl Iterator<Item = &'a DataType>,
    batch: &arrow_ipc::RecordBatch<'_>,
    body: &Buffer,
) -> Result<()> {
    let codec = batch.compression().map(|compression| compression.codec());
    let lengths = batch.buffers().into_iter().flatten().map(|buffer| buffer_length(buffer, codec, body));
    let mut lengths = lengths.collect::<Result<Vec<u64>>>()?.into_iter();
    let mut more = batch.variadicBufferCounts().into_iter().flatten();
    for kind in kinds {
        check_widths(kind, &mut lengths, &mut more)?;
    }
    Ok(())
}

/// Returns a buffer's length when it is decompressed.
fn buffer_length(buffer: &arrow_ipc::Buffer, codec: Option<CompressionType>, body: &[u8]) -> Result<u64> {
    let outside = || broken("a buffer is outside of its message");
    let start = usize::try_from(buffer.offset()).map_err(|_| outside())?;
    let length = usize::try_from(buffer.length()).map_err(|_| outside())?;
    let end = start.checked_add(length).ok_or_else(outside)?;
    let bytes = body.get(start..end).ok_or_else(outside)?;
    let Some(codec) = codec.filter(|_| length > 0) else { return Ok(length as u64) };
    let (claimed, rest) = bytes.split_first_chunk().ok_or_else(outside)?;
    let claimed = i64::from_le_bytes(*claimed);
    if claimed == -1 {
        return Ok(rest.len() as u64);
    }
    let ratio = if codec == CompressionType::LZ4_FRAME { LZ4_RATIO } else { ZSTD_RATIO };
    let most = (rest.len() as u64).saturating_mul(ratio).min(MAX_BUFFER);
    u64::try_from(claimed).ok().filter(|claimed| *claimed <= most).ok_or_else(|| {
        broken(&format!("a buffer of {} bytes claims to hold {claimed} when decompressed", rest.len()))
    })
}

/// Checks that the buffers of a column hold whole elements; the decoder panics otherwise.
fn check_widths(
    kind: &DataType,
    lengths: &mut impl Iterator<Item = u64>,
    more: &mut impl Iterator<Item = i64>,
) -> Result<()> {
    let mut next = || lengths.next().ok_or_else(|| broken("a batch has fewer buffers than its columns need"));
    let layout = layout(kind);
    if layout.can_contain_null_mask {
        next()?;
    }
    for buffer in &layout.buffers {
        let length = next()?;
        if let BufferSpec::FixedWidth { byte_width, .. } = buffer
            && length % (*byte_width as u64) != 0
        {
            return Err(broken(&format!("{length} bytes are no whole number of elements of {byte_width}")));
        }
    }
    if layout.variadic {
        for _ in 0..more.next().unwrap_or(0) {
            next()?;
        }
    }
    match kind {
        DataType::Struct(fields) => {
            fields.iter().try_for_each(|field| check_widths(field.data_type(), lengths, more))
        }
        DataType::List(item)
        | DataType::LargeList(item)
        | DataType::ListView(item)
        | DataType::LargeListView(item)
        | DataType::FixedSizeList(item, _)
        | DataType::Map(item, _) => check_widths(item.data_type(), lengths, more),
        DataType::RunEndEncoded(ends, values) => {
            check_widths(ends.data_type(), lengths, more)?;
            check_widths(values.data_type(), lengths, more)
        }
        DataType::Union(fields, _) => {
            fields.iter().try_for_each(|(_, field)| check_widths(field.data_type(), lengths, more))
        }
        _ => Ok(()),
    }
}

fn broken(reason: &str) -> ArrowError {
    ArrowError::IpcError(reason.to_owned())
}
