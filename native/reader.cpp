// Reads a Chrome trace into columns. The interface is plain C for use with ctypes. The code does not depend on
// Python or on any profiler.
//
// The grammar of the whole JSON document is checked in a single pass. Each object in the events array that has a "ph"
// member becomes one row, in file order. The args that the caller requests are stored as (row, value) pairs. After a
// malformed event, the caller searches for the next event, and parsing resumes there.
#include <cxxabi.h>
#include <setjmp.h>
#include <stdio.h>
#include <sys/mman.h>
#include <unistd.h>
#include <memory>

#include "scan.h"

static const i64 NO_TIME = INT64_MIN, NO_DURATION = -1;
static const u8 OTHER_PHASE = 1;     // "ph" is not a string of one ASCII character
static const u8 OTHER_CATEGORY = 1;  // shared by all categories beyond the limit
static const int MOST_DEPTH = 512;
static const size_t MOST_COUNTED_BYTES = 1 << 20;  // limit for top-level members while counting events

// TEXT: any value, stored as the code of its JSON text in the column's table. ID: a nonnegative integer, given as a
// number or a hexadecimal string; any other value is stored as -2 minus the code of its JSON text.
enum Kind : u8 { TEXT, INTEGER, ID };
enum Status { MORE, BAD, OUT_OF_MEMORY };
enum State { START, FIRST_MEMBER, MEMBER, AFTER_MEMBER, FIRST_EVENT, EVENT, AFTER_EVENT, END };

// A growable array. Large arrays grow by remapping rather than copying. An array in a file need not fit in memory.
template <class T>
struct Column {
  T* p = nullptr;
  size_t n = 0, room = 0;
  int file = -1;

  Column() = default;
  Column(const Column&) = delete;
  Column(Column&& other) noexcept {
    std::swap(p, other.p);
    std::swap(n, other.n);
    std::swap(room, other.room);
    std::swap(file, other.file);
  }
  ~Column() { drop(); }
  void push_back(T value) {
    if (n == room) grow();
    p[n++] = value;
  }
  void drop() {
    if (file >= 0) {
      if (p) munmap(p, room * sizeof(T));
      close(file);
    } else {
      free(p);
    }
    p = nullptr;
    n = room = 0;
    file = -1;
  }

 private:
  void grow() {
    size_t larger = room ? room + std::max(room / 2, (size_t)4096) : 4096;
    void* moved;
    if (file < 0) {
      moved = realloc(p, larger * sizeof(T));
    } else {
      if (ftruncate(file, (off_t)(larger * sizeof(T)))) throw std::bad_alloc();
      moved = mmap(nullptr, larger * sizeof(T), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
      if (moved == MAP_FAILED) throw std::bad_alloc();
      if (p) munmap(p, room * sizeof(T));
    }
    if (!moved) throw std::bad_alloc();
    p = (T*)moved;
    room = larger;
  }
};

// Values of one arg, stored as pairs because most events have few args.
struct Pairs {
  std::string key;
  Kind kind;
  Column<u32> row;
  Column<i64> value;
  Table texts;
  bool has(u64 r) const { return row.n && row.p[row.n - 1] == (u32)r; }
  void undo(u64 r) {
    if (has(r)) row.n--, value.n--;
  }
};

struct Text {
  const u8* p = nullptr;
  size_t n = 0;
};

// Changes to make in the text of copied events. The arrays belong to the caller and have one value per row.
struct Copy {
  const u8* keep;     // 0: skip, 1: copy, 2: copy and mark; null: copy all events
  const i32* lane;    // index in `lanes`, or -1 to keep the lane; null: keep all lanes
  const i64* ids;     // new id, or -1 to keep the id; null: keep all ids
  size_t rows;        // length of the arrays
  i64 shift_ns;
  std::vector<std::string> lanes;  // alternating JSON texts of pid and tid; empty: unchanged
  std::string separator;
  std::vector<u8> out;
  std::vector<i64> marks;  // for each marked event: its row, and its start and end in `out`
  u64 written = 0;
};

struct Reader {
  Column<i64> start, duration;
  Column<i32> name, track;
  Column<u8> phase, category;
  Table names, categories{255}, tracks;
  std::vector<Pairs> args;
  i32 slot[256];          // hash table from arg keys to indices in `args`
  std::vector<std::pair<std::string, size_t>> own;  // columns for members of the event itself, such as "@id"
  // Top-level members: each key and each value is followed by a line feed. The value of traceEvents is empty.
  std::vector<u8> members;
  Copy* copy = nullptr;
  bool is_counting = false;
  std::string counted_name;  // while counting, only events with this name are added to columns

  u64 rows = 0;
  State state = START;
  bool is_array = false, had_events = false, has_backslash = false;
  std::unique_ptr<u32[]> tokens;  // not zero-filled, because most of its pages are never used
  size_t token_room = 0;
  size_t token_count = 0;
  const char* error = nullptr;
  i64 error_at = -1;

  // Recent values, so that repeated values can be looked up without hashing.
  i64 last_pid[4] = {}, last_tid[4] = {};
  i32 last_track[4] = {-1, -1, -1, -1};
  int next_track = 0;
  i32 last_category = 0;
  ~Reader() { delete copy; }
};

#define FAIL(message)     \
  do {                    \
    r.error = message;    \
    return false;         \
  } while (0)

// ---------------------------------------------------------------- values

// Check that a key and a colon are at token i. If the colon is missing, advance i to the token in its place.
static inline bool check_key(Reader& r, const u8* b, const u32* t, size_t& i) {
  if (b[t[i]] != '"') FAIL("a key is expected");
  if (b[t[i + 1]] != ':') {
    i++;
    FAIL("a colon is expected");
  }
  return true;
}

// Check the grammar of the value at token i, and advance i past the value.
static bool skip_value(Reader& r, const u8* b, const u32* t, size_t& i) {
  u8 c = b[t[i]];
  if (c == '"') {
    i++;
    return true;
  }
  if (c != '{' && c != '[') {
    if (!scalar_end(b + t[i])) FAIL("a value is expected");
    i++;
    return true;
  }
  u64 stack[MOST_DEPTH / 64];
  int depth = 0;
  bool object = false;
  for (;;) {
    // A value starts at token i.
    c = b[t[i]];
    if (c == '{' || c == '[') {
      if (depth == MOST_DEPTH) FAIL("nested too deeply");
      object = c == '{';
      u64 bit = 1ULL << (depth & 63);
      stack[depth >> 6] = object ? stack[depth >> 6] | bit : stack[depth >> 6] & ~bit;
      depth++;
      i++;
      if (b[t[i]] != (object ? '}' : ']')) goto member;
    } else {
      if (c != '"' && !scalar_end(b + t[i])) FAIL("a value is expected");
      i++;
      c = b[t[i]];
      if (c == ',') {
        i++;
        goto member;
      }
      if (c != (object ? '}' : ']')) FAIL("a comma or a closing bracket is expected");
    }
    // One or more containers end at token i.
    for (;;) {
      i++;
      if (!--depth) return true;
      object = stack[(depth - 1) >> 6] >> ((depth - 1) & 63) & 1;
      c = b[t[i]];
      if (c == ',') break;
      if (c != (object ? '}' : ']')) FAIL("a comma or a closing bracket is expected");
    }
    i++;
  member:
    if (object) {
      if (!check_key(r, b, t, i)) return false;
      i += 2;
    }
  }
}

// Return the string at token i, without its quotes.
static inline Text text_at(const u8* b, const u32* t, size_t i) {
  const u8 *p = b + t[i] + 1, *q = b + t[i + 1] - 1;
  while (q >= p && *q != '"') q--;
  return {p, q > p ? (size_t)(q - p) : 0};
}

static void append_utf8(std::string& out, u32 c) {
  if (c < 0x80) {
    out += (char)c;
  } else if (c < 0x800) {
    out += (char)(0xC0 | c >> 6);
    out += (char)(0x80 | (c & 63));
  } else {
    out += (char)(0xE0 | c >> 12);
    out += (char)(0x80 | (c >> 6 & 63));
    out += (char)(0x80 | (c & 63));
  }
}

// Decode the escapes in a key. Surrogate pairs are not combined, because all keys of interest are ASCII.
static std::string unescaped(Text text) {
  std::string out;
  for (const u8 *p = text.p, *end = p + text.n; p < end; p++) {
    if (*p != '\\' || p + 1 >= end) {
      out += (char)*p;
      continue;
    }
    p++;
    if (*p == 'u' && end - p > 4) {
      append_utf8(out, (u32)(hex_value(p[1]) << 12 | hex_value(p[2]) << 8 | hex_value(p[3]) << 4 | hex_value(p[4])));
      p += 4;
    } else {
      static const char from[] = "bfnrt", to[] = "\b\f\n\r\t";
      const char* found = strchr(from, *p);
      out += found ? to[found - from] : (char)*p;
    }
  }
  return out;
}

// A key with its escapes decoded. It is always safe to read 8 bytes from its start.
struct Key {
  Text text;
  std::string decoded;
  Key(const Reader& r, Text raw) : text(raw) {
    if (r.has_backslash && memchr(raw.p, '\\', raw.n)) {
      decoded = unescaped(raw);
      text.n = decoded.size();
      decoded.append(16, 0);
      text.p = (const u8*)decoded.data();
    }
  }
};

static inline u64 first_word(Text key) {
  return key.n >= 8 ? load64(key.p) : key.n ? load64(key.p) & (~0ULL >> (64 - 8 * key.n)) : 0;
}

static inline u32 slot_of(u64 word, size_t n) { return (u32)((word * 0x9E3779B97F4A7C15ULL) >> 56 ^ n * 7) & 255; }

static inline i32 column_of(const Reader& r, Text key) {
  for (u32 s = slot_of(first_word(key), key.n);; s = (s + 1) & 255) {
    i32 c = r.slot[s];
    if (c < 0) return -1;
    const std::string& k = r.args[(size_t)c].key;
    if (k.size() == key.n && !memcmp(k.data(), key.p, key.n)) return c;
  }
}

// Return the text of the value between two tokens, without trailing whitespace.
static Text value_text(const u8* b, const u32* t, size_t from, size_t to) {
  const u8 *p = b + t[from], *q = b + t[to] - 1;
  while (q > p && CLASS[*q] & SPACE) q--;
  return {p, (size_t)(q + 1 - p)};
}

// Convert hexadecimal digits, optionally with the prefix 0x, to an integer of at most 60 bits.
static bool hex_integer(Text text, i64* out) {
  const u8 *p = text.p, *end = p + text.n;
  if (text.n > 2 && *p == '0' && (p[1] | 0x20) == 'x') p += 2;
  if (p == end || end - p > 15) return false;
  for (*out = 0; p < end; p++) {
    int digit = hex_value(*p);
    if (digit < 0) return false;
    *out = *out << 4 | digit;
  }
  return true;
}

// Add the value at token i to a column, and advance i past the value. If a key is repeated, the last value is used, as
// in json.loads.
static bool keep_value(Reader& r, size_t column, const u8* b, const u32* t, size_t& i) {
  size_t from = i;
  if (!skip_value(r, b, t, i)) return false;
  if (i >= r.token_count) FAIL("the value is not complete");
  Pairs& pairs = r.args[column];
  pairs.undo(r.rows);
  i64 x;
  if (pairs.kind != INTEGER) {
    Text text = value_text(b, t, from, i);
    if (*text.p == 'n') return true;  // null counts as missing
    if (pairs.kind == TEXT)
      x = pairs.texts.code_of(text.p, text.n);
    else if (!(*text.p == '"' ? hex_integer(text_at(b, t, from), &x) : exact_integer(text.p, text.p + text.n, &x)) || x < 0)
      x = -2 - (i64)pairs.texts.code_of(text.p, text.n);
  } else {
    const u8* p = b + t[from];
    int n = count_digits8(load64(p));
    if (n > 0 && n < 8 && ENDS[p[n]]) {
      x = (i64)value_of_digits(load64(p), n);
    } else if (*p == '"') {
      Text text = text_at(b, t, from);
      if (!exact_integer(text.p, text.p + text.n, &x)) return true;
    } else {
      Text text = value_text(b, t, from, i);
      if (!exact_integer(text.p, text.p + text.n, &x)) return true;
    }
  }
  pairs.row.push_back((u32)r.rows);
  pairs.value.push_back(x);
  return true;
}

// ---------------------------------------------------------------- events

struct Event {
  u8 phase = 0;  // 0: no "ph" member
  i64 start = NO_TIME, duration = NO_DURATION;
  Text name, category;
  Text pid, tid;            // JSON texts; empty if missing
  i64 pid_number = 0, tid_number = 0;
  bool had_args = false, pid_is_number = false, tid_is_number = false;
  Text at_ts, at_id, at_pid, at_tid;  // values that may change in a copy
};

static bool read_text(Reader& r, const u8* b, const u32* t, size_t& i, Text& out, bool scalars) {
  size_t from = i;
  if (!skip_value(r, b, t, i)) return false;
  if (i >= r.token_count) FAIL("the value is not complete");
  out = Text();
  u8 c = b[t[from]];
  if (c == '"')
    out = text_at(b, t, from);
  else if (scalars && c != '{' && c != '[' && c != 'n')
    out = value_text(b, t, from, i);
  return true;
}

static bool read_phase(Reader& r, const u8* b, const u32* t, size_t& i, u8& out) {
  Text text;
  bool is_string = b[t[i]] == '"';
  if (!read_text(r, b, t, i, text, false)) return false;
  out = OTHER_PHASE;
  if (is_string && text.n == 1 && *text.p >= ' ' && *text.p < 0x80) {
    out = *text.p;
  } else if (is_string && text.n > 1 && *text.p == '\\') {
    std::string decoded = unescaped(text);
    if (decoded.size() == 1 && decoded[0] >= ' ' && (u8)decoded[0] < 0x80) out = (u8)decoded[0];
  }
  return true;
}

static bool read_id(Reader& r, const u8* b, const u32* t, size_t& i, Text& out, i64& number, bool& is_number) {
  size_t from = i;
  const u8* p = b + t[i];
  int n = count_digits8(load64(p));
  is_number = n > 0 && n < 8 && ENDS[p[n]] && (*p != '0' || n == 1);
  if (is_number) {
    number = (i64)value_of_digits(load64(p), n);
    out = {p, (size_t)n};
    i++;
    return true;
  }
  if (!skip_value(r, b, t, i)) return false;
  out = value_text(b, t, from, i);
  if (*p == 'n') out = Text();
  return true;
}

static bool read_time(Reader& r, const u8* b, const u32* t, size_t& i, i64& out, i64 missing) {
  size_t from = i;
  const u8* end;
  if (usual_time(b + t[i], &end, &out)) {
    i++;
    return true;
  }
  if (!skip_value(r, b, t, i)) return false;
  Text text = b[t[from]] == '"' ? text_at(b, t, from) : value_text(b, t, from, i);
  if (!exact_time(text.p, text.p + text.n, &out)) out = missing;
  return true;
}

// Read the members of the object at token i. `read_value` receives each key, with i at the key's value.
template <class ReadValue>
static inline bool read_members(Reader& r, const u8* b, const u32* t, size_t& i, ReadValue read_value) {
  i++;
  if (b[t[i]] == '}') {
    i++;
    return true;
  }
  for (;;) {
    if (!check_key(r, b, t, i)) return false;
    Key key(r, text_at(b, t, i));
    i += 2;
    if (!read_value(key.text)) return false;
    u8 c = b[t[i]];
    if (c == ',') {
      i++;
    } else if (c == '}') {
      i++;
      return true;
    } else {
      FAIL("a comma or a closing bracket is expected");
    }
  }
}

static bool read_args(Reader& r, const u8* b, const u32* t, size_t& i, bool& had_args) {
  if (had_args)  // if the key is repeated, only the last value is used
    for (Pairs& pairs : r.args)
      if (pairs.key[0] != '@') pairs.undo(r.rows);
  had_args = true;
  if (b[t[i]] != '{') return skip_value(r, b, t, i);
  return read_members(r, b, t, i, [&](Text key) {
    i32 column = column_of(r, key);
    return column < 0 ? skip_value(r, b, t, i) : keep_value(r, (size_t)column, b, t, i);
  });
}

constexpr u64 word_of(const char* s) {
  u64 word = 0;
  for (int k = 0; s[k]; k++) word |= (u64)(u8)s[k] << (8 * k);
  return word;
}

// Read any other member of an event. Add its value to a column if the caller requested one; otherwise, skip it.
static bool read_own(Reader& r, Text key, const u8* b, const u32* t, size_t& i) {
  for (const auto& [name, column] : r.own)
    if (name.size() == key.n && !memcmp(name.data(), key.p, key.n)) return keep_value(r, column, b, t, i);
  return skip_value(r, b, t, i);
}

// Read the event object at token i.
static bool read_event(Reader& r, const u8* b, const u32* t, size_t& i, Event& e) {
  return read_members(r, b, t, i, [&](Text key) {
    size_t from = i;
    bool good;
    switch (key.n > 4 ? 0 : first_word(key)) {
      case word_of("ph"): good = read_phase(r, b, t, i, e.phase); break;
      case word_of("cat"): good = read_text(r, b, t, i, e.category, false); break;
      case word_of("name"): good = read_text(r, b, t, i, e.name, true); break;
      case word_of("pid"): good = read_id(r, b, t, i, e.pid, e.pid_number, e.pid_is_number); break;
      case word_of("tid"): good = read_id(r, b, t, i, e.tid, e.tid_number, e.tid_is_number); break;
      case word_of("ts"): good = read_time(r, b, t, i, e.start, NO_TIME); break;
      case word_of("dur"): good = read_time(r, b, t, i, e.duration, NO_DURATION); break;
      case word_of("args"): good = read_args(r, b, t, i, e.had_args); break;
      default: good = read_own(r, key, b, t, i);
    }
    if (!good) return false;
    if (r.copy && key.n <= 3) {
      u64 word = first_word(key);
      Text* changed = word == word_of("ts")    ? &e.at_ts
                      : word == word_of("id")  ? &e.at_id
                      : word == word_of("pid") ? &e.at_pid
                      : word == word_of("tid") ? &e.at_tid
                                               : nullptr;
      if (changed) *changed = value_text(b, t, from, i);
    }
    return true;
  });
}

static i32 track_of(Reader& r, const Event& e) {
  bool numbers = e.pid_is_number && e.tid_is_number;
  if (numbers)
    for (int k = 0; k < 4; k++)
      if (r.last_track[k] >= 0 && r.last_pid[k] == e.pid_number && r.last_tid[k] == e.tid_number) return r.last_track[k];
  std::string key;
  for (const Text* id : {&e.pid, &e.tid}) {
    if (id->n)
      key.append((const char*)id->p, id->n);
    else
      key += "null";
    if (id == &e.pid) key += ',';
  }
  size_t n = key.size();
  key.append(16, 0);
  i32 code = r.tracks.code_of((const u8*)key.data(), n);
  if (numbers) {
    int k = r.next_track++ & 3;
    r.last_pid[k] = e.pid_number;
    r.last_tid[k] = e.tid_number;
    r.last_track[k] = code;
  }
  return code;
}

static void add_row(Reader& r, const Event& e) {
  if (e.category.n) {
    const Table::Entry& last = r.categories.entries[(size_t)r.last_category];
    if (last.length != e.category.n || memcmp(r.categories.bytes.data() + last.offset, e.category.p, e.category.n))
      r.last_category = r.categories.code_of(e.category.p, e.category.n);
    r.category.push_back((u8)r.last_category);
  } else {
    r.category.push_back(0);
  }
  r.phase.push_back(e.phase);
  r.name.push_back(e.name.n ? r.names.code_of(e.name.p, e.name.n) : 0);
  r.track.push_back(track_of(r, e));
  r.start.push_back(e.start);
  r.duration.push_back(e.duration);
  r.rows++;
}

static bool has_row(const Reader& r, const Event& e) {
  const std::string& name = r.counted_name;
  return !r.is_counting || (!name.empty() && name.size() == e.name.n && !memcmp(name.data(), e.name.p, e.name.n));
}

// Copy the text of an event, replacing the values that change.
static void copy_event(Reader& r, const u8* from, const u8* to, const Event& e) {
  Copy& copy = *r.copy;
  u64 row = r.rows++;
  if (copy.keep && (row >= copy.rows || !copy.keep[row])) return;
  struct Change {
    Text old;
    const char *before, *text, *after;
  } changes[4];
  int count = 0;
  auto replace = [&](Text old, const char* text, const char* before = "", const char* after = "") {
    int k = count++;
    for (; k && changes[k - 1].old.p > old.p; k--) changes[k] = changes[k - 1];
    changes[k] = {old, before, text, after};
  };
  if (copy.lane && row < copy.rows && copy.lane[row] >= 0) {
    const std::string* lane = &copy.lanes[2 * (size_t)copy.lane[row]];
    // A missing member is inserted after the opening brace.
    if (!lane[0].empty()) e.at_pid.n ? replace(e.at_pid, lane[0].c_str()) : replace({from + 1, 0}, lane[0].c_str(), "\"pid\": ", ", ");
    if (!lane[1].empty()) e.at_tid.n ? replace(e.at_tid, lane[1].c_str()) : replace({from + 1, 0}, lane[1].c_str(), "\"tid\": ", ", ");
  }
  char id[24], time[48];
  if (copy.ids && row < copy.rows && copy.ids[row] >= 0 && e.at_id.n) {
    snprintf(id, sizeof id, "%lld", (long long)copy.ids[row]);
    replace(e.at_id, id);
  }
  if (copy.shift_ns && e.start != NO_TIME) {
    i64 ns = e.start + copy.shift_ns;
    u64 size = ns < 0 ? 0 - (u64)ns : (u64)ns;
    snprintf(time, sizeof time, "%s%llu.%03llu", ns < 0 ? "-" : "", (unsigned long long)(size / 1000),
             (unsigned long long)(size % 1000));
    const char* quote = *e.at_ts.p == '"' ? "\"" : "";
    replace(e.at_ts, time, quote, quote);
  }
  auto append = [&](const void* p, size_t n) { copy.out.insert(copy.out.end(), (const u8*)p, (const u8*)p + n); };
  if (copy.written++) append(copy.separator.data(), copy.separator.size());
  size_t begin = copy.out.size();
  for (int k = 0; k < count; k++) {
    append(from, (size_t)(changes[k].old.p - from));
    for (const char* text : {changes[k].before, changes[k].text, changes[k].after}) append(text, strlen(text));
    from = changes[k].old.p + changes[k].old.n;
  }
  append(from, (size_t)(to - from));
  if (copy.keep && copy.keep[row] == 2)
    for (u64 number : {row, (u64)begin, (u64)copy.out.size()}) copy.marks.push_back((i64)number);
}

// Read the element of the events array at token i.
static bool read_element(Reader& r, const u8* b, const u32* t, size_t& i) {
  size_t from = i;
  Event e;
  bool good = b[t[i]] == '{' ? read_event(r, b, t, i, e) : skip_value(r, b, t, i);
  // A scalar at the end of the buffer may continue in the next one.
  if (good && i >= r.token_count && !(CLASS[b[t[i - 1]]] & OPERATOR)) good = false;
  if (!good || !e.phase) {
    for (Pairs& pairs : r.args) pairs.undo(r.rows);
    return good;
  }
  if (r.copy)
    copy_event(r, b + t[from], b + t[i - 1] + 1, e);
  else if (has_row(r, e))
    add_row(r, e);
  else
    r.rows++;
  return true;
}

// ---------------------------------------------------------------- document

// Read the top-level member at token i. For traceEvents, read only the opening bracket.
static bool read_member(Reader& r, const u8* b, const u32* t, size_t& i) {
  if (!check_key(r, b, t, i)) return false;
  size_t from = i;
  Text raw = text_at(b, t, i);
  Key key(r, raw);
  i += 2;
  Text value = {b, 0};
  bool is_events = key.text.n == 11 && !memcmp(key.text.p, "traceEvents", 11);
  if (is_events) {
    if (r.had_events) FAIL("a second array of events begins");
    if (b[t[i]] != '[') FAIL("traceEvents is not an array");
    i++;
    r.had_events = true;
  } else {
    size_t begin = i;
    if (!skip_value(r, b, t, i)) return false;
    if (i >= r.token_count) FAIL("the member is not complete");
    value = value_text(b, t, begin, i);
  }
  r.state = is_events ? FIRST_EVENT : AFTER_MEMBER;
  if (r.is_counting && r.members.size() + raw.n + 2 + value.n > MOST_COUNTED_BYTES) return true;
  for (Text text : {Text{b + t[from], raw.n + 2}, value}) {
    // Replace line feeds in whitespace with spaces, because line feeds separate the texts.
    size_t at = r.members.size();
    r.members.insert(r.members.end(), text.p, text.p + text.n);
    std::replace(r.members.begin() + (long)at, r.members.end(), (u8)'\n', (u8)' ');
    r.members.push_back('\n');
  }
  return true;
}

// Parse the complete elements in the buffer. Set `taken` to the number of bytes consumed.
static Status walk(Reader& r, const u8* b, i64 base, size_t& taken) {
  const u32* t = r.tokens.get();
  size_t n = r.token_count, i = 0;
  for (;;) {
    if (i >= n) return MORE;
    u8 c = b[t[i]];
    State before = r.state;
    bool good = true;
    switch (r.state) {
      case START:
        if (c == '{') {
          r.state = FIRST_MEMBER;
        } else if (c == '[') {
          r.state = FIRST_EVENT;
          r.is_array = r.had_events = true;
        } else {
          good = false;
          r.error = "neither an object nor an array begins";
        }
        i += good;
        break;
      case FIRST_MEMBER:
      case MEMBER:
        if (c == '}' && r.state == FIRST_MEMBER) {
          r.state = END;
          i++;
        } else {
          good = read_member(r, b, t, i);
        }
        break;
      case AFTER_MEMBER:
        good = c == ',' || c == '}';
        r.state = c == ',' ? MEMBER : c == '}' ? END : r.state;
        if (!good) r.error = "a comma or a closing bracket is expected";
        i += good;
        break;
      case FIRST_EVENT:
        if (c == ']') {
          r.state = r.is_array ? END : AFTER_MEMBER;
          i++;
          break;
        }
        [[fallthrough]];
      case EVENT:
        good = read_element(r, b, t, i);
        if (good) r.state = AFTER_EVENT;
        break;
      case AFTER_EVENT:
        good = c == ',' || c == ']';
        if (c == ',') r.state = EVENT;
        if (c == ']') r.state = r.is_array ? END : AFTER_MEMBER;
        if (!good) r.error = "a comma or the end of the events is expected";
        i += good;
        break;
      case END:
        good = false;
        r.error = "something follows the document";
    }
    if (!good || i > n) {
      if (i >= n) {
        r.state = before;
        return MORE;
      }
      r.error_at = base + t[i];
      return BAD;
    }
    c = b[t[i - 1]];
    // A token marks only the start of a string or scalar, which ends before the next token.
    taken = CLASS[c] & OPERATOR ? t[i - 1] + 1 : t[i];
    while (taken && CLASS[b[taken - 1]] & SPACE) taken--;
  }
}

static Status feed(Reader& r, u8* b, size_t len, i64 base, bool is_last, size_t& taken) {
  taken = 0;
  r.error = nullptr;
  if (r.token_room < len + 256) {
    r.token_room = 0;
    r.tokens.reset();
    r.tokens.reset(new u32[len + 256]);
    r.token_room = len + 256;
  }
  memset(b + len, ' ', 64);
  Flags flags;
  size_t n = index_tokens(b, len, r.tokens.get(), flags);
  r.has_backslash = flags.backslash != 0;
  // UTF-8 and escapes are checked in a second pass, which runs only if there are non-ASCII bytes or backslashes. A
  // character that is truncated at the end of the buffer is checked in the next call.
  i64 bad = flags.control;
  const char* why = "a control character in a string";
  if (flags.nonascii) {
    i64 at = find_bad_utf8(b, len, is_last);
    if (at >= 0 && (bad < 0 || at < bad)) bad = at, why = "bytes that are not UTF-8";
  }
  if (flags.backslash) {
    i64 at = find_bad_escape(b, len, is_last);
    if (at >= 0 && (bad < 0 || at < bad)) bad = at, why = "an invalid escape";
  }
  if (bad >= 0)
    n = (size_t)(std::upper_bound(r.tokens.get(), r.tokens.get() + n, (u32)bad) - r.tokens.get());
  else if (!is_last)  // tokens up to the last closing bracket are complete; drop the rest
    while (n && b[r.tokens[n - 1]] != '}' && b[r.tokens[n - 1]] != ']') n--;
  r.token_count = n;
  for (size_t k = 0; k < 4; k++) r.tokens[n + k] = (u32)len;
  Status status = walk(r, b, base, taken);
  if (status == MORE && bad >= 0) {
    r.error = why;
    r.error_at = base + bad;
    return BAD;
  }
  return status;
}

// ---------------------------------------------------------------- names

// GNU's demangler, which passes its output to a callback in pieces. Other C++ runtimes lack this function.
extern "C" __attribute__((weak)) int __gcclibcxx_demangle_callback(const char*, void (*)(const char*, size_t, void*), void*);

struct Demangled {
  char* out;
  size_t n, room;
  jmp_buf full;
};

static void append(const char* text, size_t n, void* to) {
  Demangled& demangled = *(Demangled*)to;
  if (n >= demangled.room - demangled.n) longjmp(demangled.full, 1);  // safe: the demangler is C and owns no memory
  memcpy(demangled.out + demangled.n, text, n);
  demangled.n += n;
}

// Each back-reference in a mangled name can multiply the length of the demangled text.
static const int MOST_REFERENCES = 24;
static int count_references(const char* name) {
  int count = 0;
  for (; *name; name++) count += (*name == 'S' || *name == 'T') && (name[1] == '_' || is_digit((u8)name[1]) || (name[1] >= 'A' && name[1] <= 'Z'));
  return count;
}

// ---------------------------------------------------------------- interface

#ifndef SOURCE_HASH
#define SOURCE_HASH ""
#endif

extern "C" {
#define API __attribute__((visibility("default")))

// Version of this interface, and hash of the source files.
API int reader_format() { return 1; }
API const char* reader_source() { return SOURCE_HASH; }

// Select instructions with at most `limit` bits (512 or 256), or portable code (0). Return the name of the selection.
// Exported for tests.
API const char* reader_instructions(int limit) {
  fill_tables();
  select_block(limit);
  return index_name;
}

API Reader* reader_new(const char** keys, const u8* kinds, int n, size_t most_names) {
  if (!CLASS['"']) reader_instructions(512);
  Reader* r = nullptr;
  try {
    r = new Reader;
    std::fill(r->slot, r->slot + 256, -1);
    r->names.most_entries = r->tracks.most_entries = most_names;
    u8 none[32] = {0};
    for (Table* table : {&r->names, &r->categories}) {
      table->code_of(none, 0);  // code 0: missing
      memcpy(none, "(other)", 8);
      table->code_of(none, 7);  // code 1: table is full
      none[0] = 0;
    }
    r->tracks.code_of((const u8*)"null,null\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0", 9);
    r->tracks.code_of((const u8*)"\"(other)\",\"(other)\"\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0", 19);
    for (int c = 0; c < n; c++) {
      Pairs pairs;
      pairs.key = keys[c];
      pairs.kind = (Kind)kinds[c];
      pairs.texts.most_entries = most_names;
      if (pairs.kind != INTEGER) {
        memcpy(none, "null", 5);
        pairs.texts.code_of(none, 4);
        memcpy(none, "\"(other)\"", 10);
        pairs.texts.code_of(none, 9);
      }
      if (pairs.key[0] == '@') {
        r->own.emplace_back(pairs.key.substr(1), c);
      } else {
        char padded[72] = {0};
        memcpy(padded, pairs.key.data(), std::min<size_t>(pairs.key.size(), 64));
        u32 s = slot_of(first_word({(const u8*)padded, pairs.key.size()}), pairs.key.size());
        while (r->slot[s] >= 0) s = (s + 1) & 255;
        r->slot[s] = c;
      }
      r->args.push_back(std::move(pairs));
    }
  } catch (const std::bad_alloc&) {
    delete r;
    return nullptr;
  }
  return r;
}

API void reader_free(Reader* r) { delete r; }

// Store a column in a file. The reader takes ownership of the descriptor. Must be called before the first event.
API void reader_map(Reader* r, int column, int file) {
  switch (column) {
    case 0: r->start.file = file; return;
    case 1: r->duration.file = file; return;
    case 2: r->name.file = file; return;
    case 3: r->track.file = file; return;
    case 4: r->phase.file = file; return;
    case 5: r->category.file = file; return;
    default:
      Pairs& pairs = r->args[(size_t)(column - 16) / 2];
      if ((column - 16) & 1)
        pairs.value.file = file;
      else
        pairs.row.file = file;
  }
}

// From now on, copy events instead of adding rows. Column 7 contains the copied text, and column 8 the marks.
API int reader_copy(Reader* r, const u8* keep, const i32* lane, const i64* ids, size_t rows, const char** lanes,
                    size_t lane_count, i64 shift_ns, const char* separator) {
  try {
    delete r->copy;
    r->copy = new Copy{keep, lane, ids, rows, shift_ns, {}, separator, {}, {}, 0};
    for (size_t k = 0; k < 2 * lane_count; k++) r->copy->lanes.push_back(lanes[k]);
  } catch (const std::bad_alloc&) {
    return OUT_OF_MEMORY;
  }
  return 0;
}

// From now on, only count events. Events with this name, as written in the file, are also added to the columns.
API int reader_count(Reader* r, const char* name) {
  try {
    r->counted_name = name;
    r->is_counting = true;
  } catch (const std::bad_alloc&) {
    return OUT_OF_MEMORY;
  }
  return 0;
}

// Read the complete tokens in b[0:len], which is at offset `base` in the document. b must have room for 64 more bytes.
API int reader_feed(Reader* r, u8* b, size_t len, i64 base, int is_last, size_t* taken) {
  u8 after[64];
  memcpy(after, b + len, 64);  // these bytes may be content that the caller feeds later
  int status;
  try {
    status = feed(*r, b, len, base, is_last, *taken);
  } catch (const std::bad_alloc&) {
    status = OUT_OF_MEMORY;
  }
  memcpy(b + len, after, 64);
  return status;
}

// Resume parsing at an event, after a malformed event or after a malformed member that precedes the events.
API void reader_resume(Reader* r) {
  if (!r->had_events) r->had_events = true;
  r->state = EVENT;
}

API i64 reader_number(Reader* r, int which) {
  switch (which) {
    case 0: return (i64)r->rows;
    case 1: return r->error_at;
    case 2: return r->state;
    case 3: return r->had_events;
    case 4: return r->is_array;
    case 5: return r->copy ? (i64)r->copy->written : 0;
    default: return (i64)(r->names.overflowed + r->tracks.overflowed);
  }
}

API const char* reader_error(Reader* r) { return r->error ? r->error : ""; }

// Return the size of a column in bytes, and set `at` to its address, which is valid until the next feed or drop.
API i64 reader_column(Reader* r, int column, const void** at, int drop) {
#define RETURN_COLUMN(v)                      \
  do {                                        \
    if (drop) (v).drop();                     \
    *at = (v).p;                              \
    return (i64)((v).n * sizeof(*(v).p));     \
  } while (0)
  switch (column) {
    case 0: RETURN_COLUMN(r->start);
    case 1: RETURN_COLUMN(r->duration);
    case 2: RETURN_COLUMN(r->name);
    case 3: RETURN_COLUMN(r->track);
    case 4: RETURN_COLUMN(r->phase);
    case 5: RETURN_COLUMN(r->category);
    case 6: *at = r->members.data(); return (i64)r->members.size();
    case 7:
      if (drop) r->copy->out.clear();
      *at = r->copy->out.data();
      return (i64)r->copy->out.size();
    case 8:
      if (drop) r->copy->marks.clear();
      *at = r->copy->marks.data();
      return (i64)(r->copy->marks.size() * sizeof(i64));
    default:
      Pairs& pairs = r->args[(size_t)(column - 16) / 2];
      if ((column - 16) & 1) RETURN_COLUMN(pairs.value);
      RETURN_COLUMN(pairs.row);
  }
}

// Copy the strings of a table: 0 names, 1 categories, 2 tracks, 16 + c texts of arg c. If a buffer is null, it is not
// filled; `count` and `size` are always set.
API void reader_table(Reader* r, int which, u32* lengths, u8* bytes, i64* count, i64* size) {
  const Table& table = which == 0 ? r->names : which == 1 ? r->categories : which == 2 ? r->tracks : r->args[(size_t)which - 16].texts;
  *count = (i64)table.entries.size();
  *size = (i64)table.bytes.size();
  if (bytes && *size) memcpy(bytes, table.bytes.data(), table.bytes.size());
  if (lengths)
    for (size_t k = 0; k < table.entries.size(); k++) lengths[k] = table.entries[k].length;
}

// Set parent[i] to the innermost event that is open on the track of event i when it starts, or -1. Events must be
// sorted by track, then by start, longest first.
API int reader_nest(const i32* track, const i64* start, const i64* end, size_t n, i32* parent) {
  try {
    std::vector<i32> open;
    for (size_t i = 0; i < n; i++) {
      if (i && track[i] != track[i - 1]) open.clear();
      while (!open.empty() && end[open.back()] <= start[i]) open.pop_back();
      parent[i] = open.empty() ? -1 : open.back();
      open.push_back((i32)i);
    }
  } catch (const std::bad_alloc&) {
    return OUT_OF_MEMORY;
  }
  return 0;
}

// Split a track into segments by the open event that started last. Rows are sorted by start, and longest first.
// `begin` and `row` have room for 2 n segments. Row -1 is a gap; the last segment is the gap after the last event.
// Returns the number of segments, or -1 if memory runs out.
API i64 reader_flatten(const i64* start, const i64* end, size_t n, i64* begin, i32* row) {
  try {
    std::vector<i32> open;
    i64 count = 0;
    auto put = [&](i64 time, i32 top) {
      if (count && begin[count - 1] == time) count--;
      begin[count] = time;
      row[count++] = top;
    };
    auto close = [&](i64 time) {
      while (!open.empty() && end[open.back()] <= time) {
        i64 closed = end[open.back()];
        while (!open.empty() && end[open.back()] <= closed) open.pop_back();
        put(closed, open.empty() ? -1 : open.back());
      }
    };
    for (size_t i = 0; i < n; i++) {
      close(start[i]);
      if (end[i] <= start[i]) continue;
      open.push_back((i32)i);
      put(start[i], (i32)i);
    }
    close(INT64_MAX);
    return count;
  } catch (const std::bad_alloc&) {
    return -1;
  }
}

// Find the longest path to each node of a graph whose edges lead to later nodes. The edges to node i are `first[i]` to
// `first[i + 1] - 1`; only node 0 has none. `edge` receives the last edge of each path, and `path` the edges of the path
// to `target`, last first. Returns their number.
API i64 reader_longest_paths(const i64* first, const i64* source, const i64* weight, size_t n, i64 target, i64* length,
                             i64* edge, i64* path) {
  for (size_t i = 0; i < n; i++) {
    length[i] = i ? INT64_MIN : 0;
    for (i64 e = first[i]; e < first[i + 1]; e++) {
      i64 longer = length[source[e]] + weight[e];
      if (longer <= length[i]) continue;
      length[i] = longer;
      edge[i] = e;
    }
  }
  i64 count = 0;
  for (i64 node = target; node > 0; node = source[edge[node]]) path[count++] = edge[node];
  return count;
}

// Demangle a C++ name into `out`, which has `room` bytes. Return the length, or -1 if the name is not mangled or the
// result is too long: a name of 300 bytes can expand to gigabytes.
API i64 reader_demangle(const char* name, char* out, size_t room) {
  Demangled demangled{out, 0, room, {}};
  if (__gcclibcxx_demangle_callback) {
    if (setjmp(demangled.full)) return -1;
    if (__gcclibcxx_demangle_callback(name, append, &demangled)) return -1;
    return (i64)demangled.n;
  }
  if (count_references(name) > MOST_REFERENCES) return -1;
  int status = 0;
  char* text = abi::__cxa_demangle(name, nullptr, nullptr, &status);
  if (!text) return -1;
  size_t n = strlen(text);
  if (n < room) memcpy(out, text, n + 1);
  free(text);
  return n < room ? (i64)n : -1;
}
}
