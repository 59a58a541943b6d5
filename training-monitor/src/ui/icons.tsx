const PATHS = {
  image: "M3 4h10v8H3z M3 10l3-3 3 3 2-2 2 2 M10.5 6.5h.01",
  download: "M8 3v7 M5 7.5 8 10.5l3-3 M3.5 13h9",
  search: "M7 12A5 5 0 1 0 7 2a5 5 0 0 0 0 10z M11 11l3 3",
  sun: "M8 11a3 3 0 1 0 0-6 3 3 0 0 0 0 6z M8 1.5v1.5 M8 13v1.5 M1.5 8H3 M13 8h1.5 M3.4 3.4l1 1 M11.6 11.6l1 1 M3.4 12.6l1-1 M11.6 4.4l1-1",
  moon: "M13 9.5A5.5 5.5 0 0 1 6.5 3a5.5 5.5 0 1 0 6.5 6.5z",
  play: "M5 3.5v9l7-4.5z",
  pause: "M5.5 3.5v9 M10.5 3.5v9",
  left: "M10 3.5 5.5 8l4.5 4.5",
  right: "M6 3.5 10.5 8 6 12.5",
  first: "M4 3.5v9 M12 3.5 7.5 8l4.5 4.5",
  last: "M12 3.5v9 M4 3.5 8.5 8 4 12.5",
  film: "M2.5 3.5h11v9h-11z M5 3.5v9 M11 3.5v9 M2.5 6.5H5 M2.5 9.5H5 M11 6.5h2.5 M11 9.5h2.5",
  edit: "M3 13l.7-3L10.5 3.2l2.3 2.3L6 12.3z",
  link: "M6.5 9.5 9.5 6.5 M7.5 4.5 9 3a2.8 2.8 0 0 1 4 4l-1.5 1.5 M8.5 11.5 7 13a2.8 2.8 0 0 1-4-4l1.5-1.5",
  pin: "M6 2.5h4l-.6 4.2 2.1 2.3h-7l2.1-2.3z M8 9v4.5",
  follow: "M8 10.5a2.5 2.5 0 1 0 0-5 2.5 2.5 0 0 0 0 5z M8 1.5v2 M8 12.5v2 M1.5 8h2 M12.5 8h2",
  close: "M4 4l8 8 M12 4l-8 8",
  help: "M6 6a2 2 0 1 1 2.6 1.9c-.4.2-.6.5-.6 1v.4 M8 11.8h.01 M8 14A6 6 0 1 0 8 2a6 6 0 0 0 0 12z",
} as const;

export type IconName = keyof typeof PATHS;

export function Icon({ name, size = 16 }: { name: IconName; size?: number }) {
  return (
    <svg width={size} height={size} viewBox="0 0 16 16" fill="none" stroke="currentColor" strokeWidth="1.4" strokeLinecap="round" strokeLinejoin="round" aria-hidden="true">
      <path d={PATHS[name]} />
    </svg>
  );
}
