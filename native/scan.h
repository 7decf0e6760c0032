// SIMD structural indexing (the method of simdjson), string tables, and exact number parsing.
#pragma once

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <algorithm>
#include <new>
#include <string>
#include <vector>

#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>
#define TARGET(features) __attribute__((target(features)))
#endif

typedef uint8_t u8;
typedef uint32_t u32;
typedef uint64_t u64;
typedef int64_t i64;
typedef int32_t i32;
typedef __int128 i128;
typedef unsigned __int128 u128;

static inline u64 load64(const u8* p) {
  u64 word;
  memcpy(&word, p, 8);
  return word;
}

// ---------------------------------------------------------------- structural index

struct Flags {
  i64 control = -1;  // position of the first control character in a string, or -1
  u64 nonascii = 0, backslash = 0;
};
struct Carry {
  u64 in_string = 0, escaped = 0, scalar = 0;
};

// Character classes. `block_portable` depends on the order of the bits.
enum : u8 { QUOTE = 1, BACKSLASH = 2, OPERATOR = 4, SPACE = 8, CONTROL = 16, HIGH = 32 };
static u8 CLASS[256];
static u8 ENDS[256];  // characters that may follow a number or literal

static void fill_tables() {
  for (int c = 0; c < 256; c++) CLASS[c] = (c < 0x20 ? CONTROL : 0) | (c >= 0x80 ? HIGH : 0);
  CLASS['"'] |= QUOTE;
  CLASS['\\'] |= BACKSLASH;
  for (const char* s = "{}[],:"; *s; s++) CLASS[(u8)*s] |= OPERATOR;
  for (const char* s = " \t\n\r"; *s; s++) CLASS[(u8)*s] |= SPACE;
  for (const char* s = " \t\n\r,]}"; *s; s++) ENDS[(u8)*s] = 1;
}

static inline u64 find_escaped(u64 backslash, Carry& carry) {
  if (!backslash) {
    u64 escaped = carry.escaped;
    carry.escaped = 0;
    return escaped;
  }
  backslash &= ~carry.escaped;
  const u64 even = 0x5555555555555555ULL;
  u64 follows = backslash << 1 | carry.escaped;
  u64 odd_starts = backslash & ~even & ~follows;
  unsigned long long sequence;
  carry.escaped = __builtin_add_overflow(odd_starts, backslash, &sequence);
  return (even ^ ((u64)sequence << 1)) & follows;
}

static inline u64 prefix_xor_portable(u64 m) {
  for (int shift = 1; shift < 64; shift *= 2) m ^= m << shift;
  return m;
}

// Declare `bits`, in which each operator and the first character of each string or scalar is marked.
#define COMBINE(prefix_xor, quote_raw, backslashes, op, ws, ctl, high)                              \
  f.backslash |= backslashes;                                                                       \
  f.nonascii |= high;                                                                               \
  u64 quote = quote_raw & ~find_escaped(backslashes, c);                                            \
  u64 in_string = prefix_xor(quote) ^ c.in_string;                                                  \
  c.in_string = (u64)((i64)in_string >> 63);                                                        \
  if (__builtin_expect((ctl & in_string) != 0, 0) && f.control < 0)                                 \
    f.control = (i64)at + __builtin_ctzll(ctl & in_string);                                         \
  u64 scalar = ~(op | ws);                                                                          \
  u64 nonquote = scalar & ~quote;                                                                   \
  u64 follows = nonquote << 1 | c.scalar;                                                           \
  c.scalar = nonquote >> 63;                                                                        \
  u64 bits = (op | (scalar & ~follows)) & ~(in_string ^ quote);

static u32* block_portable(const u8* p, u32 at, u32* out, Carry& c, Flags& f) {
  u64 quote_raw = 0, backslashes = 0, op = 0, ws = 0, ctl = 0, high = 0;
  for (int i = 0; i < 64; i++) {
    u64 k = CLASS[p[i]];
    quote_raw |= (k & 1) << i;
    backslashes |= (k >> 1 & 1) << i;
    op |= (k >> 2 & 1) << i;
    ws |= (k >> 3 & 1) << i;
    ctl |= (k >> 4 & 1) << i;
    high |= (k >> 5 & 1) << i;
  }
  COMBINE(prefix_xor_portable, quote_raw, backslashes, op, ws, ctl, high)
  for (; bits; bits &= bits - 1) *out++ = at + (u32)__builtin_ctzll(bits);
  return out;
}

#if defined(__x86_64__)
TARGET("pclmul,sse4.1") static inline u64 prefix_xor_clmul(u64 m) {
  return (u64)_mm_cvtsi128_si64(_mm_clmulepi64_si128(_mm_set_epi64x(0, (i64)m), _mm_set1_epi8(-1), 0));
}

TARGET("avx512f,avx512bw,avx512vl,avx512vbmi,avx512vbmi2,pclmul,bmi,bmi2,popcnt,sse4.1")
static u32* block_avx512(const u8* p, u32 at, u32* out, Carry& c, Flags& f) {
  const __m512i v = _mm512_loadu_si512(p);
#define EQUAL(ch) _mm512_cmpeq_epi8_mask(v, _mm512_set1_epi8(ch))
  u64 quote_raw = EQUAL('"'), backslashes = EQUAL('\\');
  const __m512i low = _mm512_or_si512(v, _mm512_set1_epi8(0x20));  // turns brackets into braces
  u64 op = _mm512_cmpeq_epi8_mask(low, _mm512_set1_epi8('{')) | _mm512_cmpeq_epi8_mask(low, _mm512_set1_epi8('}')) |
           EQUAL(',') | EQUAL(':');
  u64 ctl = _mm512_cmplt_epu8_mask(v, _mm512_set1_epi8(0x20));
  u64 ws = EQUAL(' ') | EQUAL('\n') | EQUAL('\r') | EQUAL('\t');
#undef EQUAL
  u64 high = _mm512_movepi8_mask(v);
  COMBINE(prefix_xor_clmul, quote_raw, backslashes, op, ws, ctl, high)
  const __m512i iota = _mm512_set_epi8(
      63, 62, 61, 60, 59, 58, 57, 56, 55, 54, 53, 52, 51, 50, 49, 48, 47, 46, 45, 44, 43, 42, 41, 40, 39, 38, 37, 36, 35,
      34, 33, 32, 31, 30, 29, 28, 27, 26, 25, 24, 23, 22, 21, 20, 19, 18, 17, 16, 15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5,
      4, 3, 2, 1, 0);
  const __m512i found = _mm512_maskz_compress_epi8(bits, iota);
  const __m512i base = _mm512_set1_epi32((int)at);
  int n = __builtin_popcountll(bits);
#define STORE(k) \
  _mm512_storeu_si512(out + 16 * k, _mm512_add_epi32(base, _mm512_cvtepu8_epi32(_mm512_extracti32x4_epi32(found, k))))
  STORE(0);
  if (n > 16) {
    STORE(1);
    if (n > 32) {
      STORE(2);
      STORE(3);
    }
  }
#undef STORE
  return out + n;
}

TARGET("avx2,pclmul,bmi,bmi2,popcnt,sse4.1")
static u32* block_avx2(const u8* p, u32 at, u32* out, Carry& c, Flags& f) {
  const __m256i a = _mm256_loadu_si256((const __m256i*)p), b = _mm256_loadu_si256((const __m256i*)(p + 32));
#define BOTH(x, y) ((u64)(u32)_mm256_movemask_epi8(x) | (u64)(u32)_mm256_movemask_epi8(y) << 32)
#define EQUAL(va, vb, ch) BOTH(_mm256_cmpeq_epi8(va, _mm256_set1_epi8(ch)), _mm256_cmpeq_epi8(vb, _mm256_set1_epi8(ch)))
  const __m256i x20 = _mm256_set1_epi8(0x20), x1f = _mm256_set1_epi8(0x1f);
  const __m256i la = _mm256_or_si256(a, x20), lb = _mm256_or_si256(b, x20);
  u64 quote_raw = EQUAL(a, b, '"'), backslashes = EQUAL(a, b, '\\');
  u64 ws = EQUAL(a, b, ' ') | EQUAL(a, b, '\n') | EQUAL(a, b, '\r') | EQUAL(a, b, '\t');
  u64 op = EQUAL(la, lb, '{') | EQUAL(la, lb, '}') | EQUAL(a, b, ',') | EQUAL(a, b, ':');
  u64 ctl = BOTH(_mm256_cmpeq_epi8(_mm256_max_epu8(a, x1f), x1f), _mm256_cmpeq_epi8(_mm256_max_epu8(b, x1f), x1f));
  u64 high = BOTH(a, b);
#undef EQUAL
#undef BOTH
  COMBINE(prefix_xor_clmul, quote_raw, backslashes, op, ws, ctl, high)
  for (; bits; bits &= bits - 1) *out++ = at + (u32)__builtin_ctzll(bits);
  return out;
}

TARGET("xsave") static u64 enabled_registers() { return _xgetbv(0); }
#endif

typedef u32* (*Block)(const u8*, u32, u32*, Carry&, Flags&);
static Block index_block = block_portable;
static const char* index_name = "portable";

// Select the widest instructions that the CPU and the operating system support, up to `limit` bits.
static void select_block(int limit) {
  index_block = block_portable;
  index_name = "portable";
#if defined(__x86_64__)
  // __builtin_cpu_supports is not used, because it needs a symbol that some compiler runtimes lack.
  u32 a, b, c, d;
  if (!__get_cpuid(1, &a, &b, &c, &d)) return;
  bool pclmul = c >> 1 & 1, xsave = c >> 27 & 1;
  if (!pclmul || !xsave || !__get_cpuid_count(7, 0, &a, &b, &c, &d)) return;
  u64 registers = enabled_registers();
  bool bmi = (b >> 3 & 1) && (b >> 8 & 1);
  bool avx512 = (b >> 16 & 1) && (b >> 30 & 1) && (b >> 31 & 1) && (c >> 1 & 1) && (c >> 6 & 1);
  if (limit >= 512 && bmi && avx512 && (registers & 0xE6) == 0xE6) {
    index_block = block_avx512;
    index_name = "avx512";
  } else if (limit >= 256 && bmi && (b >> 5 & 1) && (registers & 6) == 6) {
    index_block = block_avx2;
    index_name = "avx2";
  }
#else
  (void)limit;
#endif
}

// Write the positions of all tokens to `out`, which must have room for len + 64 positions. Return their number.
static size_t index_tokens(const u8* p, size_t len, u32* out, Flags& f) {
  Carry c;
  u32* o = out;
  size_t at = 0;
  for (; at + 64 <= len; at += 64) o = index_block(p + at, (u32)at, o, c, f);
  if (at < len) {
    u8 last[64];
    memset(last, ' ', 64);
    memcpy(last, p + at, len - at);
    o = index_block(last, (u32)at, o, c, f);
  }
  return (size_t)(o - out);
}

// Return the position of the first invalid UTF-8 byte, or -1. Like json.loads, accept encoded surrogates. A character
// that is truncated at the end is invalid only if `is_last` is set.
static i64 find_bad_utf8(const u8* s, size_t n, bool is_last) {
  for (size_t i = 0; i < n;) {
    if (i + 8 <= n && !(load64(s + i) & 0x8080808080808080ULL)) {
      i += 8;
      continue;
    }
    u8 c = s[i];
    if (c < 0x80) {
      i++;
      continue;
    }
    int k = c >= 0xF0 ? 3 : c >= 0xE0 ? 2 : c >= 0xC2 ? 1 : -1;
    if (k < 0 || c > 0xF4) return (i64)i;
    if (i + 1 < n && ((c == 0xE0 && s[i + 1] < 0xA0) || (c == 0xF0 && s[i + 1] < 0x90) || (c == 0xF4 && s[i + 1] > 0x8F)))
      return (i64)i;
    for (int j = 1; j <= k; j++) {
      if (i + j >= n) return is_last ? (i64)i : -1;
      if ((s[i + j] & 0xC0) != 0x80) return (i64)i;
    }
    i += k + 1;
  }
  return -1;
}

static inline int hex_value(u8 c) {
  if (c >= '0' && c <= '9') return c - '0';
  c |= 0x20;
  return c >= 'a' && c <= 'f' ? c - 'a' + 10 : -1;
}

// Return the position of the first backslash that does not start a valid escape, or -1. An escape that is truncated at
// the end is invalid only if `is_last` is set.
static i64 find_bad_escape(const u8* s, size_t n, bool is_last) {
  const u8* end = s + n;
  for (const u8* p = s; (p = (const u8*)memchr(p, '\\', (size_t)(end - p)));) {
    if (end - p < 2) return is_last ? p - s : -1;
    if (p[1] != 'u') {
      if (!p[1] || !strchr("\"\\/bfnrt", p[1])) return p - s;
      p += 2;
      continue;
    }
    for (int j = 2; j < 6; j++) {
      if (p + j >= end) return is_last ? p - s : -1;
      if (hex_value(p[j]) < 0) return p - s;
    }
    p += 6;
  }
  return -1;
}

// ---------------------------------------------------------------- string tables

static inline u64 mix(u64 a, u64 b) {
  u128 r = (u128)a * b;
  return (u64)r ^ (u64)(r >> 64);
}

// Hash n bytes. May read up to 16 bytes past the end.
static inline u64 hash_bytes(const u8* p, size_t n) {
  u64 h = mix(n ^ 0x9E3779B97F4A7C15ULL, 0xD6E8FEB86659FD93ULL);
  for (; n > 16; p += 16, n -= 16) h = mix(load64(p) ^ h, load64(p + 8) ^ 0xA0761D6478BD642FULL);
  u64 a = load64(p), b = load64(p + 8);
  if (n <= 8) {
    a &= n ? ~0ULL >> (64 - 8 * n) : 0;
    b = 0;
  } else {
    b &= ~0ULL >> (128 - 8 * n);
  }
  return mix(a ^ h, b ^ 0xE7037ED1A0B428DBULL);
}

// Assigns codes to strings in order of first appearance. When the table is full, new strings get code 1.
struct Table {
  struct Entry {
    u64 hash;
    u32 offset, length;
  };
  static const size_t MOST_BYTES = 1u << 30;
  std::vector<Entry> entries;
  std::vector<i32> slots;
  std::vector<u8> bytes;
  u64 mask = 63;
  size_t most_entries;
  u64 overflowed = 0;

  explicit Table(size_t most = 1u << 24) : slots(64, -1), most_entries(most) {}

  i32 code_of(const u8* p, size_t n) {
    u64 h = hash_bytes(p, n);
    u64 s = h & mask;
    for (; slots[s] >= 0; s = (s + 1) & mask) {
      const Entry& e = entries[(size_t)slots[s]];
      if (e.hash == h && e.length == n && !memcmp(bytes.data() + e.offset, p, n)) return slots[s];
    }
    if (entries.size() >= most_entries || bytes.size() + n > MOST_BYTES) {
      overflowed++;
      return 1;
    }
    i32 code = (i32)entries.size();
    entries.push_back({h, (u32)bytes.size(), (u32)n});
    bytes.insert(bytes.end(), p, p + n);
    slots[s] = code;
    if (entries.size() * 2 > slots.size()) grow();
    return code;
  }

 private:
  void grow() {
    std::vector<i32> fresh(slots.size() * 2, -1);
    mask = fresh.size() - 1;
    for (size_t e = 0; e < entries.size(); e++) {
      u64 s = entries[e].hash & mask;
      while (fresh[s] >= 0) s = (s + 1) & mask;
      fresh[s] = (i32)e;
    }
    slots.swap(fresh);
  }
};

// ---------------------------------------------------------------- numbers

// Return the number of leading digits in 8 bytes.
static inline int count_digits8(u64 w) {
  u64 x = w ^ 0x3030303030303030ULL;
  u64 not_digit = ((x + 0x0606060606060606ULL) | x) & 0xF0F0F0F0F0F0F0F0ULL;
  // A byte above 0xF9 carries into the next byte. This is harmless, because the count stops at the first non-digit.
  return not_digit ? __builtin_ctzll(not_digit) >> 3 : 8;
}

static inline u64 value_of_digits8(u64 w) {
  w -= 0x3030303030303030ULL;
  w = w * 10 + (w >> 8);
  return ((w & 0x000000FF000000FFULL) * 0x000F424000000064ULL + (w >> 16 & 0x000000FF000000FFULL) * 0x0000271000000001ULL) >> 32;
}

// Convert the first n digits (1 to 8) to a number.
static inline u64 value_of_digits(u64 w, int n) {
  if (n < 8) w = w << (64 - 8 * n) | (0x3030303030303030ULL >> (8 * n));
  return value_of_digits8(w);
}

struct Digits {
  int count;  // at most 16
  u64 value;
};
static inline Digits read_digits(const u8* p) {
  u64 w = load64(p);
  int n = count_digits8(w);
  if (n < 8) return {n, n ? value_of_digits(w, n) : 0};
  u64 value = value_of_digits8(w), next = load64(p + 8);
  int m = count_digits8(next);
  static const u64 powers[9] = {1, 10, 100, 1000, 10000, 100000, 1000000, 10000000, 100000000};
  return {8 + m, m ? value * powers[m] + value_of_digits(next, m) : value};
}

static inline bool is_digit(u8 c) { return c >= '0' && c <= '9'; }

// Return the end of a JSON number or literal, or nullptr if it is invalid. Like json.loads, accept NaN and Infinity.
static const u8* slow_number_end(const u8* p) {
  struct Literal {
    const char* text;
    size_t length;
  };
  static const Literal literals[] = {{"true", 4}, {"false", 5}, {"null", 4}, {"NaN", 3}, {"Infinity", 8}, {"-Infinity", 9}};
  for (const Literal& literal : literals)
    if (!memcmp(p, literal.text, literal.length)) return p + literal.length;
  if (*p == '-') p++;
  if (!is_digit(*p)) return nullptr;
  if (*p++ != '0')
    while (is_digit(*p)) p++;
  if (*p == '.') {
    if (!is_digit(*++p)) return nullptr;
    while (is_digit(*p)) p++;
  }
  if ((*p | 0x20) == 'e') {
    p++;
    if (*p == '+' || *p == '-') p++;
    if (!is_digit(*p)) return nullptr;
    while (is_digit(*p)) p++;
  }
  return p;
}

// Return the end of a number or literal. Return nullptr if it is invalid, or if no whitespace, comma or closing bracket
// follows it.
static inline const u8* scalar_end(const u8* p) {
  int n = count_digits8(load64(p));
  if (n > 0 && n < 8 && ENDS[p[n]] && (p[0] != '0' || n == 1)) return p + n;
  const u8* end = slow_number_end(p);
  return end && ENDS[*end] ? end : nullptr;
}

// Convert decimal microseconds to nanoseconds, rounding half to even. Surrounding whitespace is allowed. Return false
// if the text is not a valid time.
static bool exact_time(const u8* p, const u8* end, i64* out) {
  while (p < end && CLASS[*p] & SPACE) p++;
  while (p < end && CLASS[end[-1]] & SPACE) end--;
  bool negative = p < end && *p == '-';
  if (p < end && (*p == '-' || *p == '+')) p++;
  i128 m = 0;
  i64 exponent = 3;
  bool any = false, sticky = false, fraction = false;
  for (; p < end; p++) {
    if (*p == '.' && !fraction) {
      fraction = true;
      continue;
    }
    if (!is_digit(*p)) break;
    any = true;
    if (m < (i128)1000000000000000000LL * 1000000000000000000LL) {
      m = m * 10 + (*p - '0');
      exponent -= fraction;
    } else {
      sticky |= *p != '0';
      exponent += !fraction;
    }
  }
  if (!any) return false;
  if (p < end && (*p | 0x20) == 'e') {
    p++;
    bool down = p < end && *p == '-';
    if (p < end && (*p == '-' || *p == '+')) p++;
    if (p == end || !is_digit(*p)) return false;
    i64 x = 0;
    for (; p < end && is_digit(*p); p++) x = std::min<i64>(x * 10 + (*p - '0'), 1 << 30);
    exponent += down ? -x : x;
  }
  if (p != end) return false;
  const i128 most = ((i128)1 << 52) * 1000;  // 142 years
  if (m) {
    for (; exponent > 0; exponent--)
      if ((m *= 10) > most) return false;
    if (exponent < -38) {
      m = 0;
    } else if (exponent < 0) {
      i128 divisor = 1;
      while (exponent++ < 0) divisor *= 10;
      i128 q = m / divisor, r = m % divisor, half = divisor / 2;
      m = q + (r > half || (r == half && (sticky || (q & 1))));
    }
  }
  if (m >= most) return false;
  *out = negative ? -(i64)m : (i64)m;
  return true;
}

// Read a time in one of the usual forms: an integer, optionally with three decimals. Return false for other forms.
static inline bool usual_time(const u8* p, const u8** end, i64* out) {
  Digits whole = read_digits(p);
  const u8* q = p + whole.count;
  if (!whole.count || whole.count > 15 || (p[0] == '0' && whole.count > 1)) return false;
  if (*q == '.') {
    u32 a = (u32)q[1] - '0', b = (u32)q[2] - '0', c = (u32)q[3] - '0';
    if (a > 9 || b > 9 || c > 9 || !ENDS[q[4]] || whole.value >= 1ULL << 52) return false;
    *out = (i64)(whole.value * 1000 + a * 100 + b * 10 + c);
    *end = q + 4;
    return true;
  }
  if (!ENDS[*q]) return false;
  *out = (i64)(whole.value * 1000);
  *end = q;
  return whole.value < 1ULL << 52;
}

// Convert the text in [p, end) to a signed 64-bit integer. Return false if the text is not one, or has leading zeros.
static bool exact_integer(const u8* p, const u8* end, i64* out) {
  bool negative = p < end && *p == '-';
  if (negative) p++;
  if (p == end || (*p == '0' && end - p > 1)) return false;
  i128 x = 0;
  for (; p < end; p++) {
    if (!is_digit(*p)) return false;
    x = x * 10 + (*p - '0');
    if (x > (i128)INT64_MAX + negative) return false;
  }
  *out = (i64)(negative ? -x : x);
  return true;
}
